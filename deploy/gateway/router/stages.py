"""What a request asks of an engine: a stage, and its prompt as routing policies see it."""

from collections.abc import Sequence

from longshore.deploy.gateway.router.policies import RoutedPrompt, can_reuse, extra_keys_of
from longshore.deploy.gateway.router.router import Stage
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.requests import RequestOptions
from longshore.protocol.sampling import SamplingParams


def stage_of(sampling: SamplingParams, options: RequestOptions, num_primed: int = 0) -> Stage:
    """What a request that is not split asks of an engine. num_primed: see `LiveRequests.open`."""
    params = options.kv_transfer_params or {}
    if params.get("do_remote_prefill"):
        return "decode"
    if params.get("do_remote_decode") or options.pooling is not None:
        return "prefill"
    if options.keeps_blocks or sampling.max_tokens is None:
        return "whole"
    return "prefill" if sampling.max_tokens - num_primed <= 1 else "whole"


def routed_prompt(
    token_ids: Sequence[int],
    sampling: SamplingParams,
    options: RequestOptions,
    session_key: str | None,
) -> RoutedPrompt:
    """The prompt of a request."""
    return RoutedPrompt(
        token_ids,
        extra_keys_of(options),
        uses_prefix=can_reuse(sampling, options),
        session_key=session_key,
    )


def routed_so_far(live: LiveRequest) -> RoutedPrompt:
    """The prompt of a request, with its output so far."""
    token_ids = [*live.prompt_token_ids, *live.taken_token_ids, *live.new_token_ids]
    first = live.message
    return routed_prompt(token_ids, first.sampling, first.options, live.session_key)
