"""A client's table of requests: messages out, columns in."""

from itertools import chain

import numpy as np

from longshore.deploy.requests.live_requests import LiveRequest, LiveRequests, seed_source
from longshore.protocol.errors import EngineDead
from longshore.protocol.outputs import (
    EngineOutputs,
    FinishedRequest,
    FinishReason,
    TokenLogprobs,
)
from longshore.protocol.requests import RequestOptions
from longshore.protocol.sampling import SamplingParams


class Changes:
    """Counts calls."""

    num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1


def columns(*pairs: tuple[int, int], finished: tuple[FinishedRequest, ...] = ()) -> EngineOutputs:
    handles, tokens = zip(*pairs, strict=True) if pairs else ((), ())
    return EngineOutputs(np.array(handles, np.int32), np.array(tokens, np.int32), finished=finished)


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


def test_a_request_that_keeps_its_blocks_is_ended_by_an_abort_alone() -> None:
    requests, changes = LiveRequests(), Changes()
    parent, message = requests.open(
        "p",
        [1, 2],
        SamplingParams(),
        RequestOptions(resumable=True, keeps_blocks=True),
        on_change=changes,
    )
    assert message.fork_of is None
    end = FinishedRequest(parent.handle, FinishReason.LENGTH_CAPPED, 1, session_continues=True)
    requests.apply(columns((parent.handle, 10), finished=(end,)))
    assert (parent.is_live, parent.finished, len(requests)) == (False, end, 1)
    _, message = requests.open("c", [1], SamplingParams(), on_change=changes, fork_of=parent)
    assert message.fork_of == parent.handle
    aborted = requests.abort([parent])
    assert aborted is not None
    assert aborted.handles.tolist() == [parent.handle]
    assert len(requests) == 1


def scores(*entries: tuple[int, int, list[int], list[float]]) -> TokenLogprobs:
    """Handle, position, ids and log probabilities of each; every rank is 1."""
    handles, positions, ids, values = zip(*entries, strict=True)
    return TokenLogprobs(
        owners=np.array(handles, np.int32),
        positions=np.array(positions, np.int32),
        ranks=np.ones(len(entries), np.int32),
        num_listed=np.array([len(each) for each in ids], np.int32),
        token_ids=np.array([*chain(*ids)], np.int32),
        logprobs=np.array([*chain(*values)], np.float32),
    )


def test_scores_reach_their_positions_and_the_newest_of_a_position_counts() -> None:
    requests, changes = LiveRequests(), Changes()
    first = open_one(requests, changes)  # both have two prompt tokens
    second = open_one(requests, changes)
    early = scores((first.handle, 1, [9], [-5.0]), (second.handle, 1, [2], [-1.0]))
    requests.apply(EngineOutputs(logprobs=early))
    both = columns((first.handle, 10), (second.handle, 20))
    entries = scores(
        (first.handle, 1, [2], [-0.5]),  # again, because it was preempted
        (first.handle, 2, [10, 11], [-0.25, -0.125]),
        (second.handle, 2, [20], [-2.0]),
        (99, 0, [1], [-1.0]),
    )
    requests.apply(EngineOutputs(both.handles, both.tokens, entries))
    requests.apply(
        EngineOutputs(
            columns((first.handle, 12)).handles,
            np.array([12], np.int32),
            scores((first.handle, 3, [12], [-3.0])),
        )
    )
    assert first.take_token_ids() == [10, 12]
    assert [score.logprob for score in first.take_scores(2)] == [-0.25, -3.0]
    assert [None if each is None else each.logprob for each in first.take_prompt_scores()] == [
        None,
        -0.5,
    ]
    assert second.take_token_ids() == [20]
    assert [score.best for score in second.take_scores(1)] == [()]
    assert not first.scores


def test_dead_engine_ends_every_live_request() -> None:
    requests, changes = LiveRequests(), Changes()
    live = open_one(requests, changes)
    requests.fail_all(EngineDead("gone"))
    assert isinstance(live.failure, EngineDead)
    assert not live.is_live
    assert (len(requests), changes.num_calls) == (0, 1)


def test_unseeded_requests_get_seeds_that_a_deployment_s_seed_repeats() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        requests = LiveRequests(seed_source(seed))
        opened = [requests.open("r", [1], SamplingParams(), on_change=Changes()) for _ in range(3)]
        return [message.sampling.seed for _, message in opened]

    assert seeds(5) == seeds(5)
    assert seeds(None) != seeds(None)
    assert len(set(seeds(5))) == 3
    _, message = LiveRequests().open("r", [1], SamplingParams(seed=8), on_change=Changes())
    assert message.sampling.seed == 8
