"""Administration of a running deployment: actions, the private socket that takes them, a client."""
