"""What a request asks of an engine: a stage, and its prompt as routing policies see it."""

from longshore.deploy.gateway.router.policies import RoutedPrompt, can_reuse, extra_keys_of
from longshore.deploy.gateway.router.router import Stage
from longshore.deploy.requests.live_requests import LiveRequest, RequestFields
from longshore.protocol.sampling import SamplingParams


def stage_of(sampling: SamplingParams, fields: RequestFields) -> Stage:
    """What a request that is not split asks of an engine."""
    params = fields.get("kv_transfer_params") or {}
    if params.get("do_remote_prefill"):
        return "decode"
    if params.get("do_remote_decode") or fields.get("pooling") is not None:
        return "prefill"
    if fields.get("keeps_blocks") or sampling.max_tokens is None:
        return "whole"
    return "prefill" if sampling.max_tokens - fields.get("num_primed", 0) <= 1 else "whole"


def routed_prompt(live: LiveRequest) -> RoutedPrompt:
    """The prompt of a request, with its output so far."""
    first = live.message
    return RoutedPrompt(
        [*live.prompt_token_ids, *live.taken_token_ids, *live.new_token_ids],
        extra_keys_of(first.cache_salt, first.multimodal),
        uses_prefix=can_reuse(
            first.sampling, first.pooling, skips_reading=first.skip_reading_prefix_cache
        ),
        session_key=live.session_key,
    )
