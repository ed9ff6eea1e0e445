"""Fused operations: one call each. In Triton on a GPU, in C++ on a CPU if a compiler was available,
else in plain torch.

Every kernel has a module with its wrapper and the torch reference that it is tested against.
`native/` holds the C++ sources, and `native.py` finds and loads the library. `gpu/` holds the
Triton sources, and `operators.py` makes torch operators of them.
"""
