"""What the gateway and the Python API share: requests under way, beams, speech, scores."""
