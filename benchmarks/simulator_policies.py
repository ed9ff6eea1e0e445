"""Policies whose times differ clearly, for `simulator_validation.py` and `studies.py`."""

from typing import Final

from longshore.scheduler.queue.policies import Order, OrderedPolicy, PolicyRequest

TOKENS_PER_SECOND: Final = 1000.0


class ShortestFirst(OrderedPolicy):
    ignores_priority = True

    def order(self, request: PolicyRequest) -> Order:
        return request.num_prompt_tokens


class LongestFirst(OrderedPolicy):
    ignores_priority = True

    def order(self, request: PolicyRequest) -> Order:
        return -request.num_prompt_tokens


class ShortestFirstAged(OrderedPolicy):
    """A second of waiting counts as TOKENS_PER_SECOND tokens less, so no request starves."""

    ignores_priority = True

    def order(self, request: PolicyRequest) -> Order:
        return request.num_prompt_tokens + TOKENS_PER_SECOND * request.arrival_time
