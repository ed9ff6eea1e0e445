"""What crosses a process boundary: messages, the row predictor, KV cache specs, transport, logs."""
