"""Tables and files for users: placement, kinds of variables, workers' files."""
