"""Control channel between tasks: signed requests over gRPC, by TLS on request."""
