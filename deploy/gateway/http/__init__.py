"""HTTP itself: connections, exchanges, bodies."""
