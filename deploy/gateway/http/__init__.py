"""HTTP: connections, exchanges, bodies."""
