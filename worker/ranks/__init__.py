"""The ranks of one engine: how they find each other and exchange tensors."""
