"""The process around the scheduler: start-up, the workers' handshake, the loop."""
