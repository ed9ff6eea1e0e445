"""Every family with a small device: prompts that were evicted come back from host memory, and the
tokens are those of an engine without a connector."""

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from longshore import LLM, SamplingParams
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.protocol.errors import KVCacheTooSmall
from tests.models import make_tiny_model
from tests.worker.models.cases import CASES, Case
from tests.worker.models.conftest import prompt_of

GREEDY: Final = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OFFLOADING: Final = {
    "kv_connector": "offloading",
    "kv_connector_config": json.dumps({"cpu_bytes_to_use": "64MiB", "verify_kv": "always"}),
}
QUICK: Final = {"Llama", "Phi-3, windowed", "Gemma 2", "Llama 4", "DeepSeek-V2", "Mamba 2", "Bamba",
                "Qwen3-Next", "LFM2"}  # fmt: skip
"""One per kind of KV cache group, and of state."""


def marked(case: Case) -> Any:
    marks = () if case.name in QUICK else (pytest.mark.long,)
    return pytest.param(case, id=case.name, marks=marks)


def smallest_pool(path: Path, settings: dict[str, Any]) -> int:
    """The fewest blocks that hold one request."""
    try:
        with LLM(path, **settings, num_blocks=2):
            return 1
    except KVCacheTooSmall as error:
        return int(re.findall(r"needs (\d+)", str(error))[0])


def ask(path: Path, prompts: list[list[int]], **settings: Any) -> tuple[list[list[int]], int]:
    """The tokens of one request after the other, then of all at once; and the external hits."""
    with LLM(path, **settings) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [llm.generate([each], GREEDY, use_tqdm=False)[0] for each in asked]
        outputs += llm.generate(asked, GREEDY, use_tqdm=False)
        engine = llm._engine
        assert isinstance(engine, InProcessEngine)
        engine.scheduler.check()
        num_hit_tokens = engine.scheduler.make_stats().num_external_hit_tokens
        return [list(output.outputs[0].token_ids) for output in outputs], num_hit_tokens


@pytest.mark.req("OFF-10", "LDS-01", "WRK-01", "MET-08")
@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_evicted_prompts_are_loaded_and_change_no_token(case: Case, tmp_path: Path) -> None:
    make_tiny_model(case.family, tmp_path, **{"initializer_range": 0.2, **case.settings})
    longest = min(150, case.max_model_len - 20)
    lengths = longest, longest * 2 // 3, longest * 5 // 6
    first, second, third = (prompt_of(length, seed) for seed, length in enumerate(lengths))
    changed = first[: longest * 2 // 3] + [9] * 8
    prompts = [first, second, third, [*first, 5, 6, 7], changed, second, third, first]
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "in_process": True,
        "threads": 1,
        "block_size": 16,
        "max_model_len": longest + 20,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    settings["num_blocks"] = smallest_pool(tmp_path, settings) + 2
    expected, _ = ask(tmp_path, prompts, **settings)
    tokens, num_hit_tokens = ask(tmp_path, prompts, **settings, **OFFLOADING)
    assert tokens == expected
    assert num_hit_tokens > 0


def test_every_quick_case_exists() -> None:
    assert {case.name for case in CASES} >= QUICK
