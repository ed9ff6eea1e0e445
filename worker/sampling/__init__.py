"""From logits to tokens, log probabilities and pooled vectors."""
