"""Model families: what a checkpoint's config.json says, and the layers it describes."""
