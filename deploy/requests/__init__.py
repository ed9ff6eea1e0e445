"""What the gateway and the Python API share: live requests, validation, beam search, speech."""
