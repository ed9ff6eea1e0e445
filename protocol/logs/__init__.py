"""Log records sent between processes, and rate limits for warnings that clients can cause."""
