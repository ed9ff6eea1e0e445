"""Layers that model families are built from. Weights are plain tensors filled by the loader."""
