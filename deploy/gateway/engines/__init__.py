"""The engines of a gateway: connections, load balancing, metrics; and the other gateways."""
