"""Reads scheduler traces: summaries, pictures, and exports for other tools."""
