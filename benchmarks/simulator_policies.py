"""Policies whose times differ clearly, for `simulator_validation.py`."""

from longshore.scheduler.queue.policies import Order, OrderedPolicy, PolicyRequest


class ShortestFirst(OrderedPolicy):
    ignores_priority = True

    def order(self, request: PolicyRequest) -> Order:
        return request.num_prompt_tokens


class LongestFirst(OrderedPolicy):
    ignores_priority = True

    def order(self, request: PolicyRequest) -> Order:
        return -request.num_prompt_tokens
