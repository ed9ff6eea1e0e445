"""On a GPU no step mixes devices or waits for the device: every family and setting on a fake one.

The scheduler and the worker are the real ones. Tokens are all 0, because the fake device computes
nothing.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import WhisperConfig

from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import Rewind, SampleMask, SchedulerOutput
from longshore.protocol.requests import PoolingParams
from longshore.protocol.sampling import SamplingParams
from longshore.worker.config import WorkerConfig
from longshore.worker.kernels.device_matrix import DeviceMatrix
from longshore.worker.kernels.packing import QuantisedRows
from longshore.worker.kv_cache.context_share import ContextShare
from longshore.worker.loading.quantise import Scheme, quantise
from longshore.worker.models.families import read_model_config
from longshore.worker.ranks.parallel import ALONE, Parallel
from longshore.worker.sampling.token_masks import mask_width
from longshore.worker.step import step_launcher
from longshore.worker.worker import Worker
from tests.models import SHAPE, make_tiny_config, make_tiny_model
from tests.worker.audio_plans import audio
from tests.worker.fake_device import FakeDevice, WaitsForDevice
from tests.worker.models.cases import CASES, LATENT, Case
from tests.worker.models.served_model import ServedModel
from tests.worker.models.tiny_whisper import NUM_ENCODER_TOKENS, sound
from tests.worker.models.tiny_whisper import SHAPE as WHISPER
from tests.worker.plans import Entry, Planner

DTYPES: Final = ("bfloat16", "float16", "float32")
STEP_TOKENS: Final = 48
NUM_TOKENS: Final = 4
VOCAB_SIZE: Final = 128
PROMPT: Final = tuple(range(5, 65))
CLASSIFY: Final = PoolingParams("classify", normalize=False)
POOLED: Final = (
    PoolingParams("last"),
    PoolingParams("cls"),
    PoolingParams("mean"),
    PoolingParams("mean", dimensions=8),
)
ENCODERS: Final[dict[str, dict[str, Any]]] = {
    "Bert": {"type_vocab_size": 2, "pad_token_id": 0},
    "Roberta": {"type_vocab_size": 1, "pad_token_id": 1},
    "XLMRoberta": {"type_vocab_size": 1, "pad_token_id": 2, "max_position_embeddings": 259},
}
ONE_LAYER: Final = Case("Llama, one layer", "Llama", {"num_hidden_layers": 1})


def num_layers(case: Case) -> int:
    return case.settings.get("num_hidden_layers", SHAPE["num_hidden_layers"])


SMALLEST: Final = {
    case.family: case for case in sorted(reversed(CASES), key=num_layers, reverse=True)
}
"""By family; the first of those with the fewest layers."""


def prompts_of(case: Case) -> list[list[int]]:
    """Two prompts that begin alike."""
    drawn = random.Random(0)
    first, _, second, _ = (drawn.choices(range(3, 128), k=n) for n in case.prompt_lengths)
    return [first, first[:32] + second[32:]]


def serve(path: Path, **settings: Any) -> ServedModel:
    """Prompts are computed in chunks, one beside the first decodes of the other."""
    on_device = {"device": "cuda", "load_format": "dummy", "poison_kv": False, "max_num_seqs": 2}
    given = {"max_num_batched_tokens": STEP_TOKENS, "num_tokens": NUM_TOKENS, **settings}
    return ServedModel(path, **on_device | given)


def is_quick(case: Case, dtype: str) -> bool:
    """In one dtype, one shape of each family; in the others, those of different kernels."""
    kinds = ("Llama", "GptOss", "DeepseekV2", "Bamba")
    return case is SMALLEST[case.family] and (dtype == DTYPES[0] or case.family in kinds)


def of_a_long_run(values: Sequence[str]) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def long_unless(is_quick: bool) -> list[pytest.MarkDecorator]:
    return [] if is_quick else [pytest.mark.long]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=long_unless(is_quick(case, dtype)), id=f"{case}-{dtype}")
        for case in CASES
        for dtype in (DTYPES if case in SMALLEST.values() else DTYPES[:1])
    ],
)
def test_a_decoder_computes_every_kind_of_step(
    case: Case, dtype: str, device: FakeDevice, tmp_path: Path
) -> None:
    """Warm-up, whole prompts, chunks after cached tokens, decodes, both together, and in one dtype
    captured decodes."""
    make_tiny_config(case.family, tmp_path, **case.settings)
    settings = {"max_model_len": case.max_model_len, "enforce_eager": dtype != DTYPES[0]}
    with serve(tmp_path, dtype=dtype, **settings) as served:
        assert served.answers(prompts_of(case)) == [[0] * NUM_TOKENS] * 2


@pytest.mark.parametrize("dtype", [DTYPES[0], *of_a_long_run(DTYPES[1:])])
def test_latents_are_expanded(dtype: str, device: FakeDevice, tmp_path: Path) -> None:
    make_tiny_config("DeepseekV2", tmp_path, **SMALLEST["DeepseekV2"].settings)
    settings = {"max_num_batched_tokens": 128, "enforce_eager": True}
    with serve(tmp_path, dtype=dtype, **settings) as served:
        assert served.answers([list(range(3, 123)) * 2]) == [[0] * NUM_TOKENS]


def test_decodes_read_shared_blocks_once(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def pays(num_rows: int, num_shared_tokens: int, token_bytes: int) -> bool:
        asked.append(num_shared_tokens)
        return True

    monkeypatch.setattr(step_launcher, "pays", pays)
    make_tiny_config("Llama", tmp_path)
    for enforce_eager in (True, False):
        with serve(tmp_path, dtype="bfloat16", enforce_eager=enforce_eager) as served:
            served.answers([PROMPT[:20], PROMPT[:20]])
    assert set(asked) == {16}


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_quantised_matrices_stay_as_they_are(
    family: str, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: set[DeviceMatrix] = set()
    fill = DeviceMatrix.fill

    def noted(matrix: DeviceMatrix, first: int, rows: QuantisedRows) -> None:
        kept.add(matrix)
        fill(matrix, first, rows)

    monkeypatch.setattr(DeviceMatrix, "fill", noted)
    source, model = tmp_path / "source", tmp_path / "model"
    make_tiny_model(family, source, **SMALLEST[family].settings)
    model.mkdir()
    quantise(source, read_model_config(source), Scheme("int4", 32), model, show_progress=False)
    with serve(model, dtype="bfloat16", load_format="auto") as served:
        assert served.answers([PROMPT, PROMPT[:20]]) == [[0] * NUM_TOKENS] * 2
    # Of each layer two of attention, and the two of a network or of its experts.
    assert len(kept) == 4 * num_layers(SMALLEST[family])


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
def test_keys_and_values_are_kept_in_fp8(family: str, device: FakeDevice, tmp_path: Path) -> None:
    case = SMALLEST[family]
    make_tiny_config(family, tmp_path, **case.settings)
    with serve(tmp_path, dtype="bfloat16", kv_cache_dtype="fp8_e4m3") as served:
        assert served.answers(prompts_of(case)) == [[0] * NUM_TOKENS] * 2


@pytest.mark.parametrize("dtype", [DTYPES[0], *of_a_long_run(DTYPES[1:])])
def test_a_model_with_an_encoder_hears_audio(
    dtype: str, device: FakeDevice, tmp_path: Path
) -> None:
    config = WhisperConfig(**WHISPER)
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    settings = {
        "max_model_len": 96,
        "max_num_batched_tokens": 96,
        "num_encoder_tokens": NUM_ENCODER_TOKENS,
        "dtype": dtype,
    }
    with serve(tmp_path, **settings) as served:
        for seed in range(3):
            served.add([1, 17, 40, 99] * 8, audio(sound(seed), NUM_ENCODER_TOKENS))
        assert served.answers([]) == []
        assert served.tokens == [[0] * NUM_TOKENS] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_gives_vectors_and_scores(
    family: str, dtype: str, device: FakeDevice, tmp_path: Path
) -> None:
    settings = {"max_position_embeddings": 258, **ENCODERS[family], "num_labels": 3}
    make_tiny_config(family, tmp_path, head="ForSequenceClassification", **settings)
    tokens = [{"id": 3, "content": "|"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"sep_token": "|"}))
    with serve(tmp_path, dtype=dtype, max_num_batched_tokens=256) as served:
        assert num_elements(served, [CLASSIFY, *POOLED]) == [3, 64, 64, 64, 8]


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_a_decoder_gives_vectors_and_scores(
    family: str, device: FakeDevice, tmp_path: Path
) -> None:
    settings = {**SMALLEST[family].settings, "num_labels": 3}
    make_tiny_config(family, tmp_path, head="ForSequenceClassification", **settings)
    with serve(tmp_path, dtype="bfloat16") as served:
        assert num_elements(served, [CLASSIFY, *POOLED]) == [3, 64, 64, 64, 8]


def num_elements(served: ServedModel, asked: Sequence[PoolingParams]) -> list[int]:
    for seed, pooling in enumerate(asked):
        served.add([5 + seed] * 40, pooling=pooling)
    served.answers([])
    return [len(served.ended[handle].pooled) for handle in range(len(asked))]


QUICK_SHARDS: Final = (
    "Llama", "Phi3", "Olmo2", "Mixtral", "GptOss", "DeepseekV2", "Bamba", "Qwen3Next"
)  # fmt: skip


class Steps:
    """Plans in, on one rank of a decoder."""

    def __init__(self, path: Path, case: Case = ONE_LAYER, parallel: Parallel = ALONE) -> None:
        make_tiny_config(case.family, path, **case.settings)
        config = WorkerConfig(
            model=str(path),
            device="cuda",
            load_format="dummy",
            dtype="bfloat16",
            num_blocks=40,
            max_num_seqs=4,
            max_num_batched_tokens=STEP_TOKENS,
            eos_token_ids=(2,),
            enforce_eager=True,
            speculative_config='{"method": "ngram", "num_speculative_tokens": 4}',
        )
        self._runner = Worker(config, parallel).start()
        block_size = 16 * parallel.context_share.size
        self.plans = Planner(num_blocks=40, block_size=block_size, max_num_seqs=4)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        masked = self.plans.rows_to_mask()
        mask = None
        if masked:
            bits = np.full(len(masked) * mask_width(VOCAB_SIZE), 0x55, np.uint8)
            mask = SampleMask(plan.epoch, plan.step, int32_array(masked), bits)
        return self._runner.execute(plan, mask)


@pytest.fixture
def steps(device: FakeDevice, tmp_path: Path) -> Steps:
    return Steps(tmp_path)


SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all of these": {"temperature": 0.8, "top_k": 5, "top_p": 0.7, "min_p": 0.1, "seed": 3},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "logit_bias": {"logit_bias": {5: 2.0, 9: -100.0}},
    "bad words": {"bad_words_token_ids": ((4,), (0, 7), (5, 6, 8))},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (11, 12)},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "everything": {
        "temperature": 0.8, "top_k": 5, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "logit_bias": {5: 2.0}, "bad_words_token_ids": ((4,), (0, 7)),
        "min_tokens": 2, "logprobs": 3, "prompt_logprobs": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
def test_rows_sample_with_any_settings(settings: str, steps: Steps) -> None:
    """Of one row, beside a greedy one and a prompt in chunks."""
    sampling = SamplingParams(**{"temperature": 0.0, **SETTINGS[settings]})
    plans = steps.plans
    rows = [Entry(0, PROMPT[:20], sampling=sampling), Entry(1, [5, 6])]
    steps.execute(plans.plan({0: 20, 1: 2}, added=rows))
    steps.execute(plans.plan({2: 30}, added=[Entry(2, PROMPT, sampling=sampling)]))
    steps.execute(plans.plan({2: len(PROMPT) - 30}))
    for _ in range(2):
        steps.execute(plans.plan())


@pytest.mark.parametrize("settings", SETTINGS)
def test_rows_verify_drafts_with_any_settings(settings: str, steps: Steps) -> None:
    """All tokens are 0, so drafts of 0 are right. Beside a row without drafts and a prompt."""
    sampling = SamplingParams(**{"temperature": 0.0, **SETTINGS[settings]})
    plans = steps.plans
    rows = [Entry(0, PROMPT[:20], sampling=sampling), Entry(1, [5, 6])]
    steps.execute(plans.plan({0: 20, 1: 2}, added=rows))
    plan = plans.plan({2: 30}, added=[Entry(2, PROMPT)], drafts={0: [0, 0, 7, 0]})
    assert plans.verified(steps.execute(plan)) == {0: [0, 0, 0], 1: [0]}
    plan = plans.plan({2: len(PROMPT) - 30}, drafts={0: [0], 1: [0, 0]})
    assert plans.verified(steps.execute(plan)) == {0: [0, 0], 1: [0, 0, 0], 2: [0]}


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("method", ["draft_model", "mtp", "eagle3"])
def test_a_drafter_with_weights_runs_in_the_step(
    method: str, enforce_eager: bool, device: FakeDevice, tmp_path: Path
) -> None:
    """After kernels and after captured decodes; the second prompt begins with a hit."""
    config = {"method": method, "num_speculative_tokens": 3}
    path, drafter = tmp_path / "model", tmp_path / "drafter"
    if method == "mtp":
        settings = {**LATENT, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 1}
        make_tiny_config("DeepseekV3", path, **settings)
    else:
        make_tiny_config("Llama", path, num_hidden_layers=3)
        config["model"] = str(drafter)
        make_tiny_config("Llama", drafter, num_hidden_layers=1, num_key_value_heads=4)
    if method == "eagle3":
        given = json.loads((drafter / "config.json").read_text())
        eagle = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 40,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        }
        (drafter / "config.json").write_text(json.dumps(given | eagle))
    settings = {"enforce_eager": enforce_eager, "speculative_config": json.dumps(config)}
    with serve(path, num_tokens=12, **settings) as served:
        assert served.answers(prompts_of(ONE_LAYER)) == [[0] * 12] * 2
        assert served.answers(prompts_of(ONE_LAYER))[-1] == [0] * 12
        assert served.scheduler.make_stats().num_accepted_tokens > 20


@pytest.mark.parametrize("settings", ["greedy", "all of these", "everything"])
def test_rows_sample_under_token_masks(settings: str, steps: Steps) -> None:
    sampling = SamplingParams(**{"temperature": 0.0, **SETTINGS[settings]})
    masked = Entry(0, PROMPT[:20], sampling=sampling, has_structured_output=True)
    steps.execute(steps.plans.plan({0: 20, 1: 2}, added=[masked, Entry(1, [5, 6])]))
    for _ in range(2):
        steps.execute(steps.plans.plan())


def test_blocks_are_copied_and_zeroed_and_rows_rewound(steps: Steps) -> None:
    plans = steps.plans
    steps.execute(plans.plan({0: 40}, added=[Entry(0, PROMPT[:40])]))
    *whole, source = plans.blocks[0]
    blocks = [*whole, target] = [*whole, plans.free.pop()]
    fork = Entry(1, PROMPT[:40], [0], blocks=blocks, num_computed_tokens=40)
    steps.execute(plans.plan({1: 1}, added=[fork], copies=[(source, target, 8)]))
    zeroed = int32_array(plans.free[:3])
    steps.execute(msgspec.structs.replace(plans.plan(), zero_block_ids=zeroed))
    rewind = Rewind(row=0, num_computed_tokens=16, num_known_tokens=41)
    steps.execute(plans.plan({0: 25}, rewound=[rewind]))


def test_the_guard_of_blocks_waits_for_the_device_by_design(
    device: FakeDevice, tmp_path: Path
) -> None:
    make_tiny_config("Llama", tmp_path)
    settings = {"poison_kv": True, "enforce_eager": True}
    with serve(tmp_path, **settings) as served, pytest.raises(WaitsForDevice):
        served.answers([PROMPT])


@pytest.fixture
def two_ranks() -> Iterator[dist.ProcessGroup]:
    """A group whose other rank never does anything, and nothing waits for it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=long_unless(family in QUICK_SHARDS))
        for family, case in SMALLEST.items()
    ],
    ids=str,
)
def test_a_shard_computes_its_part(
    case: Case, device: FakeDevice, two_ranks: dist.ProcessGroup, tmp_path: Path
) -> None:
    shard = Parallel(0, 2, shard_group=two_ranks, all_ranks=two_ranks)
    settings = {"max_model_len": case.max_model_len, "enforce_eager": True}
    make_tiny_config(case.family, tmp_path, **case.settings)
    with serve(tmp_path, parallel=shard, dtype="bfloat16", **settings) as served:
        assert served.answers(prompts_of(case)) == [[0] * NUM_TOKENS] * 2


def run_ranks(steps: Steps, *, feeds_back: bool = False) -> None:
    """A prompt in chunks beside another one, then decodes."""
    plans = steps.plans
    steps.execute(plans.plan({0: 40, 1: 2}, added=[Entry(0, PROMPT), Entry(1, [5, 6])]))
    decoded = int32_array([1])
    for scheduled in ({0: len(PROMPT) - 40}, {}):
        plan = plans.plan(scheduled)
        if feeds_back:
            plan = msgspec.structs.replace(plan, sampled_rows=decoded, sampled_tokens=decoded)
        steps.execute(plan)
        decoded = int32_array([0, 1])


@pytest.mark.parametrize("name", ["Llama, one KV head", "DeepSeek-V2"])
def test_ranks_share_the_context(
    name: str, device: FakeDevice, two_ranks: dist.ProcessGroup, tmp_path: Path
) -> None:
    (case,) = (case for case in CASES if case.name == name)
    for rank in range(2):
        parallel = Parallel(
            rank,
            2,
            shard_group=two_ranks,
            all_ranks=two_ranks,
            context_share=ContextShare(rank, 2, 1),
            context_group=two_ranks,
        )
        run_ranks(Steps(tmp_path, case, parallel))


@pytest.mark.parametrize("family", ["Llama", "Mixtral", "DeepseekV2"])
def test_stages_pass_their_states_on(
    family: str, device: FakeDevice, two_ranks: dist.ProcessGroup, tmp_path: Path
) -> None:
    for stage in range(2):
        parallel = Parallel(stage=stage, num_stages=2, all_ranks=two_ranks)
        run_ranks(Steps(tmp_path, SMALLEST[family], parallel), feeds_back=True)
