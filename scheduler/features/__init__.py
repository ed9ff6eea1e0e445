"""Features that only some requests or deployments use, one file each."""
