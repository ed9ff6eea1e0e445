"""What operators see: reports, block snapshots, the request log, worker statistics."""
