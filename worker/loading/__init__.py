"""Loading: from a checkpoint's files to a model's tensors."""
