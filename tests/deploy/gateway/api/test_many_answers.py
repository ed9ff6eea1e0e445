"""A request with a thousand answers: each event costs what the answers cost that it is about, and
no iteration of the event loop submits, shows or ends more than a few of them."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import pytest

from longshore.deploy.gateway.api.engine_requests import ENDED_PER_TURN, SUBMITTED_PER_TURN
from longshore.deploy.gateway.api.generation import Generation
from longshore.deploy.gateway.api.pooled_run import PooledRun
from longshore.deploy.gateway.engines.split_requests import TooManyWaiting
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.request_turns import REQUESTS_PER_TURN
from longshore.deploy.gateway.text.answer_text import AnswerText, StopStrings
from longshore.deploy.gateway.text.chat_template import PLAIN_TEMPLATE, ChatTemplate
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.requests.errors import RateLimited
from longshore.deploy.requests.generation_spec import GenerationSpec, Piece
from longshore.protocol.requests import PoolingParams, RequestOptions
from longshore.protocol.sampling import SamplingParams
from tests.deploy.gateway.direct_engines import DirectEngines
from tests.deploy.tiny_tokenizer import byte_level_tokenizer
from tests.harness.operations import count_operations, grows_at_most_n_log_n

SIZES: Final = (256, 512, 1024)
"""Up to the limit of a request."""


def generation_of(engines: DirectEngines, num_prompts: int, **settings: Any) -> Generation:
    spec = GenerationSpec(
        request_id="r",
        prompts=[[3, 4, 5]] * num_prompts,
        sampling=SamplingParams(seed=1),
        is_stream=False,
        arrived_s=0.0,
        **settings,
    )
    return Generation(
        spec,
        engines,  # type: ignore[arg-type]
        ModelTokenizer(byte_level_tokenizer(), ChatTemplate(PLAIN_TEMPLATE, {})),
        GatewayMetrics(),
        turn=partial(engines.turns.wait, "a"),
        end_turn=partial(engines.end_turns.wait, "a"),
    )


def pooled_run_of(engines: DirectEngines, num_inputs: int, max_in_flight: int) -> PooledRun:
    return PooledRun(
        request_id="r",
        prompts=[[3]] * num_inputs,
        options=RequestOptions(pooling=PoolingParams()),
        param="input",
        max_in_flight=max_in_flight,
        arrived_s=0.0,
        client=engines,  # type: ignore[arg-type]
        metrics=GatewayMetrics(),
        turn=partial(engines.turns.wait, "a"),
        end_turn=partial(engines.end_turns.wait, "a"),
    )


async def most_per_iteration(work: Awaitable[Any], count: Callable[[], int]) -> int:
    """By how much the count grows at most in one iteration of the loop."""
    counts, task = [0], asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0)
        counts.append(count())
    task.result()
    return max(later - earlier for earlier, later in itertools.pairwise(counts))


async def test_an_iteration_of_the_loop_submits_and_ends_few_answers_of_a_request() -> None:
    engines = DirectEngines()
    generation = generation_of(engines, 1000)
    most = await most_per_iteration(generation.start(), lambda: len(engines.sent))
    assert len(engines.sent) == 1000
    assert most <= SUBMITTED_PER_TURN * (REQUESTS_PER_TURN + 1)
    most = await most_per_iteration(generation.__aexit__(), lambda: engines.num_aborted)
    assert engines.num_aborted == 1000
    assert most <= ENDED_PER_TURN * (REQUESTS_PER_TURN + 1)


async def test_an_iteration_of_the_loop_submits_and_ends_few_inputs_of_a_request() -> None:
    engines = DirectEngines()
    run = pooled_run_of(engines, 2048, max_in_flight=256)
    ends = asyncio.ensure_future(run.ends())
    while len(engines.sent) < 256:
        num_before = len(engines.sent)
        await asyncio.sleep(0)
        num_new = len(engines.sent) - num_before
        assert num_new <= SUBMITTED_PER_TURN * (REQUESTS_PER_TURN + 1)
    ends.cancel()
    most = await most_per_iteration(run.__aexit__(), lambda: engines.num_aborted)
    assert engines.num_aborted == 256
    assert most <= ENDED_PER_TURN * (REQUESTS_PER_TURN + 1)


async def test_all_answers_end_when_their_turns_are_not_awaited_to_the_end() -> None:
    engines = DirectEngines()
    generation = generation_of(engines, 300)
    await generation.start()
    end = asyncio.ensure_future(generation.__aexit__())
    await asyncio.sleep(0)
    assert 0 < engines.num_aborted < 300
    end.cancel()
    with pytest.raises(asyncio.CancelledError):
        await end
    assert engines.num_aborted == 300
    assert not len(engines.requests)


async def test_every_request_that_cannot_wait_for_an_engine_is_to_be_sent_again() -> None:
    """Also those for vectors."""

    def submit(*_: Any, **__: Any) -> Any:
        raise TooManyWaiting("the limit is 2")

    engines = DirectEngines()
    engines.submit = submit  # type: ignore[method-assign]
    for submitting in (generation_of(engines, 2).start(), pooled_run_of(engines, 2, 2).ends()):
        with pytest.raises(RateLimited, match="the limit is 2"):
            await submitting


async def test_samples_are_forks_of_one_that_lives_although_their_turns_come_later() -> None:
    engines, parents = DirectEngines(), []
    submit = engines.submit

    def take(*args: Any, **fields: Any) -> Any:
        fork_of = fields["fork_of"]
        parents.append(fork_of)
        if len(parents) == 10:
            engines.finish(engines.sent[0])
        return submit(*args, **fields)

    engines.submit = take  # type: ignore[method-assign]
    generation = generation_of(engines, 2, num_samples=20)
    await generation.start()
    sent = engines.sent
    assert parents[:20] == [None, *[sent[0]] * 9, *[sent[9]] * 10]
    assert parents[20:] == [None, *[sent[20]] * 19]
    await generation.__aexit__()


async def answered(num_prompts: int) -> None:
    """Its answers end one by one, in steps of their own."""
    engines, pieces = DirectEngines(), []

    async def read(generation: Generation) -> None:
        async with generation:
            async for some in generation.pieces():
                pieces.extend(some)

    stops = StopStrings(tuple(letter * 200 for letter in "abcdefghijklmnop"))
    reading = asyncio.ensure_future(read(generation_of(engines, num_prompts, stops=stops)))
    while len(engines.sent) < num_prompts:
        await asyncio.sleep(0)
    for live in reversed(engines.sent):
        engines.finish(live)
        await asyncio.sleep(0)
    await reading
    assert len(pieces) == num_prompts


async def aborted(num_prompts: int) -> None:
    engines = DirectEngines()
    generation = generation_of(engines, num_prompts)
    await generation.start()
    await generation.__aexit__()
    assert engines.num_aborted == num_prompts


async def embedded(num_inputs: int) -> None:
    engines = DirectEngines()
    run = pooled_run_of(engines, num_inputs, max_in_flight=num_inputs // 2)
    async with run:
        ends = asyncio.ensure_future(run.ends())
        for number in range(num_inputs):
            while len(engines.sent) <= number:
                await asyncio.sleep(0)
            engines.finish(engines.sent[number])
            await asyncio.sleep(0)
        assert len(await ends) == num_inputs


@pytest.mark.parametrize("event", [answered, aborted, embedded])
def test_the_work_for_a_request_grows_with_the_number_of_its_answers(
    event: Callable[[int], Awaitable[None]],
) -> None:
    counts = {n: count_operations(lambda n=n: asyncio.run(event(n))) for n in SIZES}
    assert grows_at_most_n_log_n(counts), counts


def test_an_answer_costs_the_same_however_long_the_stop_strings_are() -> None:
    tokenizer = ModelTokenizer(byte_level_tokenizer(), ChatTemplate(PLAIN_TEMPLATE, {}))
    counts = []
    for length in (10, 250):
        stops = StopStrings(tuple(letter * length for letter in "abcdefghijklmnop"))

        def answer(stops: StopStrings = stops) -> None:
            AnswerText(tokenizer, [3], stops).append(tokenizer.encode("a bc de"))

        answer()  # the first one prepares them for all
        counts.append(count_operations(answer))
    assert counts[0] == counts[1]


async def test_all_pieces_are_yielded_when_many_answers_grow_at_once() -> None:
    engines, pieces = DirectEngines(), list[Piece]()
    generation = generation_of(engines, 200)
    async with generation:
        await generation.start()
        for live in engines.sent:
            engines.finish(live)
        async for some in generation.pieces():
            pieces += some
    assert sorted(piece.index for piece in pieces) == list(range(200))
