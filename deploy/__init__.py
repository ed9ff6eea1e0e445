"""Which processes exist, with what settings: CLI, configuration, supervisor, gateway."""
