"""The scheduler process: startup, the workers' handshake, the loop."""
