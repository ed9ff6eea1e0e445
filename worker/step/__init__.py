"""One step on the device: rows, inputs, the forward pass, and the queue that it runs on."""
