"""A model folder, read without a tensor library."""
