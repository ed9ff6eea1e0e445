"""A connector of tests, which the scheduler process imports."""

from longshore.connectors.base import AskLater, Match, Matched, RequestView, SchedulerConnector


class AsksForever(SchedulerConnector):
    """Does not know yet what it can load for prompts that begin with the token of `?`."""

    worker_half = "longshore.connectors.base:WorkerConnector"

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return AskLater() if int(request.token_ids[1]) == ord("?") else Matched(0)
