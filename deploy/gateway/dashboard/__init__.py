"""The dashboard page and the data behind it."""
