"""The Triton kernels as operators (`operators.py`). Wrappers and references are one folder up."""
