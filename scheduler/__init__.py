"""Which requests run in the next step, on which blocks."""
