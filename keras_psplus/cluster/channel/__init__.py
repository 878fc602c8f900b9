"""The control channel between tasks: signed requests over gRPC, by TLS where it is asked for."""
