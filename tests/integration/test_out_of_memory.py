"""A device that has no memory for large steps: they are computed again in smaller parts, and the
tokens are those of a calm run."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from longshore import LLM, SamplingParams
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.protocol.errors import EngineDead

PROMPTS: Final = [[20 + (7 * i + 3 * n) % 90 for i in range(40 + 30 * n)] for n in range(6)]
GREEDY: Final = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SETTINGS: Final[dict[str, Any]] = {
    "num_blocks": 600,
    "max_num_seqs": 8,
    "max_num_scheduled_tokens": 256,
    "threads": 1,
    "dtype": "float32",
    "device": "cpu",
    "verify_plan": True,
    "in_process": True,
}
FAILURES: Final[dict[str, Callable[[], object]]] = {
    "gpu": lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
    "cpu": lambda: torch.empty(10**9, 10**9),
    "host": lambda: bytearray(1 << 62),
}


def lack_memory(llm: LLM, max_tokens: int, fail: Callable[[], object]) -> list[int]:
    """From now on, steps of more tokens fail. Returns a list that gets the sizes of all steps."""
    engine = llm._engine
    assert isinstance(engine, InProcessEngine)
    model, sizes = engine.worker.model, []
    run_layers = model.run_layers

    def run(x: Any, *args: Any) -> Any:
        sizes.append(len(x))
        result = run_layers(x, *args)  # what has been written is not valid
        if len(x) > max_tokens:
            fail()
        return result

    model.run_layers = run  # type: ignore[method-assign]
    return sizes


def generate(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, progress=False)


@pytest.fixture(scope="module")
def calm(tiny_model: tuple[Path, Any]) -> list[list[int]]:
    with LLM(tiny_model[0], **SETTINGS) as llm:
        return [list(output.token_ids) for output in generate(llm, PROMPTS)]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "not cached"])
def test_steps_that_do_not_fit_are_computed_in_smaller_parts(
    tiny_model: tuple[Path, Any],
    calm: list[list[int]],
    failure: str,
    is_cached: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLM(tiny_model[0], enable_prefix_caching=is_cached, **SETTINGS) as llm:
        sizes = lack_memory(llm, 70, FAILURES[failure])
        outputs = generate(llm, PROMPTS)
        assert [list(output.token_ids) for output in outputs] == calm
        assert max(sizes) > 128
        del sizes[:]
        assert [list(output.token_ids) for output in generate(llm, PROMPTS)] == calm
        assert max(sizes) <= 64  # it stays lower
    limits = [r.getMessage() for r in caplog.records if "no memory for a step" in r.getMessage()]
    assert [("128 tokens" in limit, "64 tokens" in limit) for limit in limits] == [
        (True, False),
        (False, True),
    ]


def test_memory_that_is_lacking_while_others_decode_does_not_change_their_tokens(
    tiny_model: tuple[Path, Any], calm: list[list[int]]
) -> None:
    """Later prompts are admitted beside decodes, which are in flight when the step fails."""
    settings = {**SETTINGS, "max_num_seqs": 2}
    with LLM(tiny_model[0], **settings) as llm:
        sizes = lack_memory(llm, 100, FAILURES["gpu"])
        assert [list(output.token_ids) for output in generate(llm, PROMPTS)] == calm
        assert max(sizes) > 100


def test_requests_that_do_not_fit_alone_end_with_an_error_and_the_engine_goes_on(
    tiny_model: tuple[Path, Any], calm: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(tiny_model[0], **SETTINGS) as llm:
        engine: Any = llm._engine
        run_layers = engine.worker.model.run_layers
        lack_memory(llm, 0, FAILURES["gpu"])
        for output in generate(llm, PROMPTS):
            assert output.finish_reason == "error"
            assert "no memory to compute this request" in str(output.error)
        engine.worker.model.run_layers = run_layers
        assert [list(output.token_ids) for output in generate(llm, PROMPTS)] == calm
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_other_failures_still_end_the_engine(tiny_model: tuple[Path, Any]) -> None:
    def fail() -> None:
        raise RuntimeError("the device is on fire")

    with LLM(tiny_model[0], **SETTINGS) as llm:
        lack_memory(llm, 70, fail)
        with pytest.raises(EngineDead, match="on fire"):
            generate(llm, PROMPTS)
