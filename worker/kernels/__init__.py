"""Fused operations: one call each, in C++ where a compiler has built them, else in plain torch.

Every kernel has a module with its wrapper and the reference in torch that it is tested against;
`native/` holds the C++, and `native.py` finds and loads it.
"""
