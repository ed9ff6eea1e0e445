"""`longshore bench`: offline throughput, and latency of a running server."""
