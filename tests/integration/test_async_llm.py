"""`AsyncLLM`: streams of the demo model, by the arguments and outputs of vLLM's."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from longshore import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from longshore.deploy.llm.outputs import RequestOutput
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.errors import EngineDead

SETTINGS: dict[str, Any] = {"num_blocks": 600, "max_num_seqs": 16, "threads": 1}
PROMPT = "Berth 4 holds the ship Aurora. Which berth holds the ship Aurora?"
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def made() -> Any:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=DEMO_MODEL_DIR, enforce_eager=True, **SETTINGS)
    )
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(made: AsyncLLM) -> AsyncLLM:
    return made


def answers_of(params: SamplingParams) -> RequestOutput:
    with LLM(DEMO_MODEL_DIR, in_process=True, **SETTINGS) as llm:
        return llm.generate(PROMPT, params, use_tqdm=False)[0]


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_streams_end_with_the_answers_of_llm(
    engine: AsyncLLM, kind: RequestOutputKind
) -> None:
    params = SamplingParams(
        n=2, temperature=1.2, seed=3, max_tokens=80, logprobs=1, ignore_eos=True, output_kind=kind
    )
    wanted = answers_of(params)
    outputs = await collect(engine.generate(PROMPT, params, f"kind-{kind.name}"))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {f"kind-{kind.name}"}
    assert {output.prompt for output in outputs} == {PROMPT}
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1
    else:
        assert len(outputs) > 2  # a busy machine may deliver many tokens at once
    for index, answer in enumerate(wanted.outputs):
        pieces = [each for output in outputs for each in output.outputs if each.index == index]
        assert pieces[-1].finish_reason == answer.finish_reason == "length"
        if kind is RequestOutputKind.DELTA:
            assert "".join(piece.text for piece in pieces) == answer.text
            assert [token for piece in pieces for token in piece.token_ids] == answer.token_ids
            assert sum(len(piece.logprobs or ()) for piece in pieces) == 80
        else:
            assert (pieces[-1].text, pieces[-1].token_ids) == (answer.text, answer.token_ids)
            lengths = [len(piece.token_ids) for piece in pieces]
            assert lengths == sorted(lengths)
        assert pieces[-1].cumulative_logprob == pytest.approx(answer.cumulative_logprob, abs=1e-3)


async def test_a_stop_string_ends_a_stream_where_it_ends_an_answer(engine: AsyncLLM) -> None:
    whole = answers_of(LONG).outputs[0].text
    params = SamplingParams(
        temperature=0,
        max_tokens=400,
        ignore_eos=True,
        stop=whole[20:23],
        output_kind=RequestOutputKind.DELTA,
    )
    outputs = await collect(engine.generate(PROMPT, params, "stop"))
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", whole[20:23])
    text = "".join(each.text for output in outputs for each in output.outputs)
    assert text == whole[: whole.index(whole[20:23])]


async def test_requests_run_together(engine: AsyncLLM) -> None:
    streams = [
        collect(engine.generate({"prompt_token_ids": [5 + i]}, LONG, f"many-{i}")) for i in range(8)
    ]
    for outputs in await asyncio.gather(*streams):
        assert len(outputs[-1].outputs[0].token_ids) == 400


async def test_an_aborted_request_ends_with_that_reason(engine: AsyncLLM) -> None:
    outputs = []
    async for output in engine.generate(PROMPT, LONG, "abort"):
        outputs.append(output)
        if len(outputs) == 3:
            await engine.abort("abort")
    last = outputs[-1]
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert 0 < len(last.outputs[0].token_ids) < 400
    await engine.abort(["abort", "unknown"])  # it has ended


async def test_a_stream_that_is_left_is_aborted(engine: AsyncLLM) -> None:
    stream = engine.generate(PROMPT, LONG, "left")
    assert (await anext(stream)).outputs
    with pytest.raises(ValueError, match="request_id='left' is that of a live request"):
        await anext(engine.generate(PROMPT, LONG, "left"))
    await stream.aclose()  # type: ignore[attr-defined]
    assert engine._client is not None
    assert engine._client.num_live_requests == 0
    async with asyncio.timeout(60):
        while not await engine.reset_prefix_cache():  # the abort is on its way
            await asyncio.sleep(0.05)
    (output,) = await collect(engine.generate(PROMPT, SamplingParams(max_tokens=1), "left"))
    assert output.finished


async def test_a_stream_follows_its_constraint(engine: AsyncLLM) -> None:
    params = SamplingParams(
        max_tokens=40, structured_outputs=StructuredOutputsParams(json={"enum": ["free", "taken"]})
    )
    outputs = await collect(engine.generate(PROMPT, params, "constrained"))
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].text in ('"free"', '"taken"')


async def test_vectors_are_those_of_llm(engine: AsyncLLM) -> None:
    params = PoolingParams(dimensions=32)
    with LLM(DEMO_MODEL_DIR, in_process=True, **SETTINGS) as llm:
        (wanted,) = llm.encode(PROMPT, params, use_tqdm=False)
    (output,) = [each async for each in engine.encode(PROMPT, params, "vector")]
    assert (output.request_id, output.finished, output.error) == ("vector", True, None)
    assert output.prompt_token_ids == wanted.prompt_token_ids
    assert output.outputs.data == pytest.approx(wanted.outputs.data, abs=1e-5)
    cut = {"truncate_prompt_tokens": 5}
    stream = engine.encode(PROMPT, params, "cut", tokenization_kwargs=cut)
    (output,) = [each async for each in stream]
    assert len(output.prompt_token_ids) == 5
    with pytest.raises(ValueError, match="dimensions"):
        await anext(engine.encode(PROMPT, PoolingParams(dimensions=1 << 20), "invalid"))


async def test_a_request_for_a_vector_can_be_aborted(engine: AsyncLLM) -> None:
    stream = engine.encode([5] * 2000, PoolingParams(), "aborted vector")
    first = asyncio.ensure_future(anext(stream))
    while "aborted vector" not in engine._streams:
        await asyncio.sleep(0)
    await engine.abort("aborted vector")
    output = await first
    assert (output.error, output.outputs.data.size) == ("the request was aborted", 0)


async def test_prompts_are_tokenized_as_asked_for(engine: AsyncLLM) -> None:
    cut = {"truncate_prompt_tokens": 5}
    for text in (PROMPT, PROMPT * 100):  # a long one is tokenized on another thread
        stream = engine.generate(text, SamplingParams(max_tokens=1), "cut", tokenization_kwargs=cut)
        (output,) = await collect(stream)
        assert len(output.prompt_token_ids) == 5


async def test_what_the_engine_rejects_is_a_value_error(engine: AsyncLLM) -> None:
    grammar = StructuredOutputsParams(grammar='root ::= "a" missing')
    params = SamplingParams(structured_outputs=grammar)
    with pytest.raises(ValueError, match="missing"):
        await collect(engine.generate(PROMPT, params, "grammar"))


async def test_what_is_invalid_is_a_value_error(engine: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="prompt has no tokens"):
        await collect(engine.generate([], LONG, "empty"))
    params = SamplingParams(stop_token_ids=[1 << 20])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        await collect(engine.generate("x", params, "outside"))
    with pytest.raises(ValueError, match="lora_request is not supported"):
        await collect(engine.generate("x", LONG, "lora", lora_request=object()))  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"AsyncLLM\.sleep is not supported"):
        engine.sleep()


async def test_tokenizer_health_and_metrics(engine: AsyncLLM) -> None:
    tokenizer = await engine.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode(PROMPT), skip_special_tokens=True).strip() == PROMPT
    await engine.check_health()
    assert engine.get_default_sampling_params().max_tokens
    await collect(engine.generate("x", SamplingParams(max_tokens=2), "metrics"))
    async with asyncio.timeout(60):
        while not engine.get_metrics():
            await asyncio.sleep(0.1)


async def test_a_dead_engine_raises_and_leaves_nothing() -> None:
    before = psutil.Process().children()
    async with AsyncLLM(DEMO_MODEL_DIR, **SETTINGS) as engine:
        children = [child for child in psutil.Process().children() if child not in before]
        (worker,) = (child for child in children if "longshore.worker" in child.cmdline())
        stream = engine.generate(PROMPT, LONG, "dead")
        await anext(stream)
        worker.kill()
        with pytest.raises(EngineDead, match=r"worker 0 was killed \(SIGKILL\)"):
            await collect(stream)
        with pytest.raises(EngineDead):
            await engine.check_health()
    assert not any(child.is_running() for child in children)
    with pytest.raises(EngineDead, match="shut down"):
        await collect(engine.generate("x", LONG, "late"))


async def test_shutting_down_fails_live_streams() -> None:
    engine = AsyncLLM(DEMO_MODEL_DIR, **SETTINGS)
    stream = engine.generate(PROMPT, LONG, "live")
    await anext(stream)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        await collect(stream)
