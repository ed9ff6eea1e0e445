"""Which requests an engine cannot serve, and what their client is told."""

import math
from typing import Final

from longshore.protocol.client import MAX_NAME_CHARACTERS, AddRequest, FinishReason
from longshore.scheduler.config import SchedulerConfig

MAX_HANDLE: Final = 2**31 - 1


def refusal(
    message: AddRequest, *, config: SchedulerConfig, vocab_size: int, is_duplicate: bool
) -> tuple[FinishReason, str] | None:
    """(finish reason, text for the client) of a request that must not be queued, else None."""
    num_prompt = len(message.prompt_token_ids)
    num_tokens = num_prompt + len(message.output_token_ids)
    if is_duplicate:
        return FinishReason.ERROR, (
            f"request {message.request_id!r} (handle {message.handle}) is still running; "
            "give each request an id of its own"
        )
    if not 0 <= message.handle <= MAX_HANDLE:
        return FinishReason.ERROR, f"handle {message.handle} is not within 0..{MAX_HANDLE}"
    if not (math.isfinite(message.age_s) and message.age_s >= 0):
        return FinishReason.ERROR, f"age_s={message.age_s} is no number of seconds of at least 0"
    for name in ("request_id", "cache_salt"):
        if len(getattr(message, name) or "") > MAX_NAME_CHARACTERS:
            return FinishReason.ERROR, f"{name} is longer than {MAX_NAME_CHARACTERS} characters"
    if num_prompt == 0:
        return FinishReason.ERROR, "the prompt has no tokens; there is nothing to continue"
    if num_tokens >= config.max_model_len:
        return FinishReason.IGNORED, (
            f"the prompt has {num_tokens} tokens, the engine's limit for prompt and output is "
            f"{config.max_model_len}; at least one must be left for the output"
        )
    if any(token_id >= vocab_size for token_id in message.sampling.stop_token_ids):
        return FinishReason.ERROR, f"a stop token id lies outside 0..{vocab_size - 1}"
    for ids in (message.prompt_token_ids, message.output_token_ids):
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
            return FinishReason.ERROR, f"a token id lies outside 0..{vocab_size - 1}"
    if message.kv_transfer_params is not None:
        return FinishReason.ERROR, (
            "kv_transfer_params were given, but this engine has no KV connector that could use them"
        )
    return None
