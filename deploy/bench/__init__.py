"""`longshore bench`: measures offline throughput, and latency of a running server."""
