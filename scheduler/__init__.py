"""Who runs in the next step, on which blocks."""
