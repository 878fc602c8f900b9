"""The command `keras-psplus`: run, serve, doctor, bench."""
