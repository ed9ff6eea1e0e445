"""Cost models: the time of a step, the built-in rooflines, and files that are not valid."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from longshore.deploy.simulator.cost_model import CostModel, StepTerms, StepWork, read_cost_model
from longshore.deploy.simulator.rooflines import ROOFLINES
from longshore.deploy.simulator.simulation import load_cost_model
from longshore.deploy.simulator.worker import SimulatedWorker
from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import ConfigError
from longshore.protocol.plan import RowStart, SchedulerOutput
from longshore.protocol.sampling import SamplingParams

VALID = {"name": "mine", "kv_bytes_per_token": 8, "overhead": {"per_step_s": 1.0}}


def test_a_step_takes_the_larger_of_compute_and_memory_and_the_overhead() -> None:
    model = CostModel(
        name="sum",
        kv_bytes_per_token=2,
        compute=StepTerms(per_token_s=1.0, per_attended_s=0.1),
        memory=StepTerms(per_step_s=5.0, per_context_s=0.01),
        overhead=StepTerms(per_row_s=100.0, per_sample_s=1000.0),
    )
    assert model.step_s(StepWork(2, 10, 100, 1, 1)) == 6.0 + 1100
    assert model.step_s(StepWork(20, 10, 100, 1, 0)) == 21.0 + 100


def test_the_rooflines_agree_with_figures_computed_by_hand() -> None:
    h100, h200 = ROOFLINES["h100-llama-8b"], ROOFLINES["h200-llama-8b"]
    assert h100.kv_bytes_per_token == 131_072
    # A decode of one request reads 15 GB of weights at 0.8 of 3.35 TB/s.
    assert h100.step_s(StepWork(1, 100, 100, 1, 1)) == pytest.approx(5.6e-3 + 0.5e-3, rel=0.02)
    # A chunk of 2048 tokens computes 2 * 7e9 operations per token at 0.6 of 989 TFLOP/s.
    assert h100.step_s(StepWork(2048, 2048**2 // 2, 2048, 1, 1)) == pytest.approx(
        (2048 * 2 * 6.98e9 + 4 * 32 * 4096 * 2048**2 / 2) / 594e12 + 0.5e-3, rel=0.01
    )
    decode = StepWork(256, 256 * 1000, 256 * 1000, 256, 256)
    assert h200.step_s(decode) < h100.step_s(decode)
    for model in ROOFLINES.values():
        assert model.kv_cache_bytes is not None
        assert model.kv_cache_bytes / model.kv_bytes_per_token > 126_195 + 10_000  # longest request


def test_the_work_of_a_step_counts_attended_and_context_tokens() -> None:
    worker = SimulatedWorker(4, {"a": 11, "b": 12}.__getitem__)
    prompts = {"a": 10, "b": 7}

    def start(row: int, name: str, computed: int) -> RowStart:
        prompt, blocks = int32_array(range(prompts[name])), (int32_array([1]),)
        return RowStart(row, row + 1, name, computed, 30, prompt, blocks, SamplingParams())

    def plan(step: int, num_tokens: int, **changes: object) -> SchedulerOutput:
        return SchedulerOutput(1, step, step - 1, 2, num_tokens, 0, **changes)  # type: ignore[arg-type]

    added = (start(2, "a", 4), start(0, "b", 0))
    rows, tokens = int32_array([0, 2]), int32_array([3, 6])
    step = worker.execute(plan(1, 9, added=added, scheduled_rows=rows, scheduled_tokens=tokens))
    attended = sum(range(5, 11)) + sum(range(1, 4))
    assert step.work == StepWork(9, attended, 10 + 3, 2, 1)
    assert step.sampled_tokens.tolist() == [11]
    step = worker.execute(plan(2, 5, scheduled_rows=rows[:1], scheduled_tokens=int32_array([4])))
    assert step.work == StepWork(5, 11 + sum(range(4, 8)), 11 + 7, 2, 2)
    assert step.sampled_tokens.tolist() == [12, 11]


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    for model in ROOFLINES.values():
        path.write_bytes(msgspec.json.encode(model))
        assert load_cost_model(str(path)) == model
    path.write_text(json.dumps({**VALID, "fit": {"mean_error": 0.1}}))
    assert read_cost_model(path).overhead.per_step_s == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overhead": {"per_step_s": -1}}, r"per_step_s"),
        ({"overhead": {"per_stop_s": 1}}, r"per_stop_s"),
        ({"overhead": {}}, "takes no time"),
        ({"kv_bytes_per_token": 3}, "kv_bytes_per_token=3 is odd"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token"),
        ({"transfers": {"load_bytes_per_s": 0}}, "load_bytes_per_s"),
        ({"host": {"plan_s": 1e400}}, "plan_s|is not JSON"),
        ({"name": None}, "name"),
    ],
)
def test_a_field_that_is_invalid_is_named(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(VALID | change))
    with pytest.raises(ConfigError, match=message) as caught:
        read_cost_model(path)
    assert "model.json" in str(caught.value)


def test_an_unknown_name_lists_the_built_in_models() -> None:
    with pytest.raises(ConfigError, match="h100-llama-8b"):
        load_cost_model("h100-llama-9b")
    assert np.isfinite(ROOFLINES["h100x2-qwen-32b"].step_s(StepWork(1, 1, 1, 1, 1)))
