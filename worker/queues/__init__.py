"""Device queues: the compute queue, and the transfer queues beside it."""
