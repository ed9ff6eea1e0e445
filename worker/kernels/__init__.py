"""Fused operations: one call each, in C++ if a compiler was available, else in plain torch.

Every kernel has a module with its wrapper and the torch reference that it is tested against.
`native/` holds the C++ sources, and `native.py` finds and loads the library.
"""
