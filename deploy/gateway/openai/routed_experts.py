"""The experts of an answer's tokens in JSON: an array as numpy's `save` writes it, in base64, as in
vLLM."""

import base64
import io

import msgspec
import numpy as np

from longshore.protocol.routed_experts import RoutedExperts


def encoded(experts: RoutedExperts | None) -> str | msgspec.UnsetType:
    """The array (num_tokens, num_layers, top_k)."""
    if experts is None:
        return msgspec.UNSET
    file = io.BytesIO()
    np.save(file, experts.array())
    return base64.b64encode(file.getbuffer()).decode()
