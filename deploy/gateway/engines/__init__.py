"""The engines behind a gateway: connections, choice, metrics."""
