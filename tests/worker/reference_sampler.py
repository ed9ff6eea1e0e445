"""Sampling as defined: one row, one token, no tensors. It is the oracle of the fast sampler.

Logits and penalties are float32, as in a model; probabilities are float64.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longshore.protocol.sampling import SamplingParams
from longshore.worker.sampling.uniform import uniform

Float32s = npt.NDArray[np.float32]


def edited(
    logits: Float32s,
    prompt: Sequence[int],
    outputs: Sequence[int],
    sampling: SamplingParams,
    eos_token_ids: Sequence[int] = (),
) -> Float32s:
    """Bad words, then min_tokens, then biases, then penalties."""
    logits = logits.copy()
    for word in sampling.bad_words_token_ids:
        *before, last = word
        if len(outputs) >= len(before) and list(outputs[len(outputs) - len(before) :]) == before:
            logits[last] = -math.inf
    if len(outputs) < sampling.min_tokens:
        for token_id in {*eos_token_ids, *sampling.stop_token_ids}:
            logits[token_id] = -math.inf
    for token_id, bias in (sampling.logit_bias or {}).items():
        logits[token_id] += np.float32(bias)
    for token_id in {*prompt, *outputs}:
        if logits[token_id] > 0:
            logits[token_id] /= np.float32(sampling.repetition_penalty)
        else:
            logits[token_id] *= np.float32(sampling.repetition_penalty)
    for token_id, count in Counter(outputs).items():
        logits[token_id] -= np.float32(sampling.frequency_penalty) * np.float32(count)
        logits[token_id] -= np.float32(sampling.presence_penalty)
    return logits


def kept(logits: Float32s, sampling: SamplingParams) -> dict[int, float]:
    """The tokens that may be sampled and their weights, in the order of ids."""
    scaled = [float(logit) / sampling.temperature for logit in logits]
    most = max(scaled)
    weights = {i: math.exp(value - most) for i, value in enumerate(scaled)}
    weights = {i: weight for i, weight in weights.items() if weight >= sampling.min_p}
    if sampling.top_k == 0 and sampling.top_p == 1:
        return weights
    best_first = sorted(weights, key=lambda i: -logits[i])
    best_first = best_first[: sampling.top_k or None]
    total = sum(weights[i] for i in best_first)
    chosen: dict[int, float] = {}
    for i in best_first:
        if sum(chosen.values()) >= sampling.top_p * total:
            break
        chosen[i] = weights[i]
    return {i: chosen[i] for i in sorted(chosen)}


def pick(logits: Float32s, sampling: SamplingParams, num_outputs: int) -> int:
    """The token for the output position after `num_outputs`."""
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    weights = kept(logits, sampling)
    assert sampling.seed is not None
    seed = np.array([sampling.seed & (2**64 - 1)], np.uint64)
    (u,) = uniform(seed, np.array([num_outputs]))
    target, passed = u * sum(weights.values()), 0.0
    for token_id, weight in weights.items():
        passed += weight
        if passed > target:
            return token_id
    return [token_id for token_id, weight in weights.items() if weight > 0][-1]


def generate(
    table: Float32s,
    prompt: Sequence[int],
    sampling: SamplingParams,
    num_tokens: int,
    eos_token_ids: Sequence[int] = (),
) -> list[int]:
    """Outputs of a model with the logits table[last token]."""
    outputs: list[int] = []
    for _ in range(num_tokens):
        last = [*prompt, *outputs][-1]
        logits = edited(table[last], prompt, outputs, sampling, eos_token_ids)
        outputs.append(pick(logits, sampling, len(outputs)))
    return outputs


def log_probability(logits: Float32s, token_id: int) -> float:
    wide = logits.astype(np.float64)
    return float(wide[token_id] - wide.max() - math.log(np.exp(wide - wide.max()).sum()))


def rank(logits: Float32s, token_id: int) -> int:
    return 1 + int((logits > logits[token_id]).sum())
