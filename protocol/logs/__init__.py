"""Log records between processes, and limits on how many a client can cause."""
