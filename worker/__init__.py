"""How one step becomes tensors: models, layers, attention, kernels, transfers."""
