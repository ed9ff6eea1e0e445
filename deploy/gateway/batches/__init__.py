"""OpenAI's files and batches: requests in a file, which are answered when others leave capacity."""
