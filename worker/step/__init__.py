"""One step on the device: rows, inputs, forward pass, and the compute queue."""
