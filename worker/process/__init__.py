"""The worker process: startup, the loop, and the host and device it runs on."""
