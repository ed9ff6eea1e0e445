"""Layers from which model families are built. Weights are plain tensors filled by the loader."""
