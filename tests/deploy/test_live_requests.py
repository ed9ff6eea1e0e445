"""A client's table of requests: handles out, columns in."""

import numpy as np

from longshore.deploy.live_requests import LiveRequest, LiveRequests
from longshore.protocol.client import EngineOutputs, FinishedRequest, FinishReason
from longshore.protocol.errors import EngineDead
from longshore.protocol.sampling import SamplingParams


class Changes:
    """Counts calls."""

    num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1


def columns(*pairs: tuple[int, int], finished: tuple[FinishedRequest, ...] = ()) -> EngineOutputs:
    handles, tokens = zip(*pairs, strict=True) if pairs else ((), ())
    return EngineOutputs(np.array(handles, np.int32), np.array(tokens, np.int32), finished)


def open_one(requests: LiveRequests, changes: Changes, **sampling: int) -> LiveRequest:
    live, message = requests.open("r", [1, 2], SamplingParams(**sampling), on_change=changes)
    assert message.handle == live.handle
    return live


def test_each_request_gets_its_tokens_in_order_and_one_call_per_message() -> None:
    requests, first_changes, second_changes = LiveRequests(), Changes(), Changes()
    first = open_one(requests, first_changes)
    second = open_one(requests, second_changes)
    end = FinishedRequest(second.handle, FinishReason.STOPPED, 1)
    requests.apply(
        columns((first.handle, 10), (second.handle, 20), (first.handle, 11), finished=(end,))
    )
    assert (first.take_token_ids(), second.take_token_ids()) == ([10, 11], [20])
    assert (first.finished, second.finished) == (None, end)
    assert (first_changes.num_calls, second_changes.num_calls) == (1, 1)
    assert len(requests) == 1


def test_tokens_of_an_aborted_request_are_dropped() -> None:
    requests, changes = LiveRequests(), Changes()
    live = open_one(requests, changes)
    message = requests.abort([live])
    assert message is not None
    assert message.handles.tolist() == [live.handle]
    assert requests.abort([live]) is None
    requests.apply(columns((live.handle, 10)))
    assert (live.take_token_ids(), changes.num_calls) == ([], 0)


def test_dead_engine_ends_every_live_request() -> None:
    requests, changes = LiveRequests(), Changes()
    live = open_one(requests, changes)
    requests.fail_all(EngineDead("gone"))
    assert isinstance(live.failure, EngineDead)
    assert not live.is_live
    assert (len(requests), changes.num_calls) == (0, 1)


def test_unseeded_requests_get_seeds_that_a_deployment_s_seed_repeats() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        requests = LiveRequests(seed)
        opened = [requests.open("r", [1], SamplingParams(), on_change=Changes()) for _ in range(3)]
        return [message.sampling.seed for _, message in opened]

    assert seeds(5) == seeds(5)
    assert seeds(None) != seeds(None)
    assert len(set(seeds(5))) == 3
    _, message = LiveRequests().open("r", [1], SamplingParams(seed=8), on_change=Changes())
    assert message.sampling.seed == 8
