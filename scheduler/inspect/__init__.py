"""What an operator can look at: reports, block snapshots, the log."""
