"""Reads model folders, without a tensor library."""
