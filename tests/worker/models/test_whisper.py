"""Whisper: the tokens of transformers through the model runner, on every path of a row."""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from longshore.protocol.kv_cache_spec import CrossAttentionSpec, FullAttentionSpec, LongestRequest
from longshore.protocol.plan import Rewind, SchedulerOutput
from longshore.worker.config import WorkerConfig
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.kv_cache.report import report_on
from longshore.worker.models.families import read_model_config
from longshore.worker.ranks.parallel import Parallel
from longshore.worker.step.model_runner import ModelRunner
from longshore.worker.worker import Worker
from tests.reference import ReferenceAnswer, assert_greedy_equal
from tests.worker.audio_plans import AudioPlanner, audio
from tests.worker.models.paged_model import PagedModel, forward_logits, greedy
from tests.worker.models.served_model import ServedModel
from tests.worker.models.thread_ranks import on_every_rank
from tests.worker.models.tiny_whisper import (
    NUM_ENCODER_TOKENS,
    PROMPT,
    greedy_transcript,
    input_features,
    make_tiny_whisper,
    padded,
    sound,
)
from tests.worker.plans import Entry

NUM_TOKENS = 20
MAX_LEN = 96
BLOCK_SIZE = 16
NUM_BLOCKS = 60
SOUNDS = [sound(seed, seconds) for seed, seconds in enumerate((1.0, 0.4, 0.83, 1.0))]
LONG_PROMPT = (*range(20, 57), *PROMPT)
VARIANTS: dict[str, dict[str, Any]] = {
    "two layers each": {},
    "an encoder of other sizes, untied": {
        "encoder_layers": 3,
        "encoder_attention_heads": 8,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 128,
        "tie_word_embeddings": False,
        "activation_function": "silu",
    },
}


@dataclass(frozen=True)
class Heard:
    """A checkpoint and the transformers model that wrote it."""

    path: Path
    reference: Any

    def answer(
        self,
        samples: npt.NDArray[np.float32],
        prompt: Sequence[int] = PROMPT,
        num_tokens: int = NUM_TOKENS,
    ) -> ReferenceAnswer:
        features = input_features(self.path, samples)
        return greedy_transcript(self.reference, features, prompt, num_tokens)

    def logits(self, samples: npt.NDArray[np.float32], token_ids: Sequence[int]) -> torch.Tensor:
        exact = copy.deepcopy(self.reference).double()  # without transformers' rounding
        features = input_features(self.path, samples).double()
        with torch.inference_mode():
            given = exact(input_features=features, decoder_input_ids=torch.tensor([token_ids]))
        return given.logits[0].float()


@pytest.fixture(scope="module", params=VARIANTS)
def heard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Heard:
    path = tmp_path_factory.mktemp("whisper")
    return Heard(path, make_tiny_whisper(path, **VARIANTS[request.param]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Heard:
    path = tmp_path_factory.mktemp("plain")
    return Heard(path, make_tiny_whisper(path))


@dataclass
class Transcriber:
    """Rows of a runner, driven by hand. Blocks that no row holds are set to NaN.

    tokens: sampled tokens, by row.
    """

    runner: ModelRunner
    planner: AudioPlanner = field(
        default_factory=lambda: AudioPlanner(
            num_encoder_tokens=NUM_ENCODER_TOKENS,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            max_model_len=MAX_LEN,
        )
    )
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def start(
        self,
        sounds: Mapping[int, npt.NDArray[np.float32]],
        *,
        prompt: Sequence[int] = PROMPT,
        scheduled: Mapping[int, int] | None = None,
        **settings: Any,
    ) -> None:
        """A step in which rows start, each with its audio. scheduled: tokens of rows that do not
        compute all they have."""
        self.planner.sounds |= sounds
        entries = []
        for row in sounds:
            self.tokens.setdefault(row, [])
            entries.append(Entry(row, prompt, outputs=list(self.tokens[row])))
        counts = {row: len(prompt) + len(self.tokens[row]) for row in sounds}
        self.step(counts | dict(scheduled or {}), added=entries, **settings)

    def step(self, scheduled: Mapping[int, int] | None = None, **settings: Any) -> SchedulerOutput:
        plan = self.planner.plan(scheduled, **settings)
        cache = self.runner._launcher.state.cache
        cache.buffer[torch.tensor(self.planner.free)] = 0xFF
        output = self.runner.execute(plan)
        assert not len(output.nan_rows)
        for row, token in self.planner.tokens_of(output).items():
            self.tokens[row].append(token)
        return plan

    def finish(self, rows: Sequence[int]) -> None:
        while any(len(self.tokens[row]) < NUM_TOKENS for row in rows):
            self.step()

    def answers(self, rows: Sequence[int]) -> list[list[int]]:
        return [self.tokens[row][:NUM_TOKENS] for row in rows]


@pytest.fixture
def transcribe() -> Iterator[Callable[..., Transcriber]]:
    workers: list[Worker] = []

    def open_(heard: Heard, **settings: Any) -> Transcriber:
        config = WorkerConfig(
            model=str(heard.path),
            num_blocks=NUM_BLOCKS,
            max_num_seqs=4,
            show_progress=False,
            **settings,
        )
        workers.append(Worker(config))
        return Transcriber(workers[-1].start())

    yield open_
    for worker in workers:
        worker.close()


@pytest.mark.req("FEA-10")
def test_a_request_is_answered_as_transformers_does(
    heard: Heard, transcribe: Callable[..., Transcriber]
) -> None:
    for samples in SOUNDS:
        rows = transcribe(heard)
        rows.start({2: samples})
        rows.finish([2])
        assert_greedy_equal(rows.answers([2]), [heard.answer(samples)])


def test_different_audio_gives_different_outputs(heard: Heard) -> None:
    answers = {tuple(heard.answer(samples).token_ids) for samples in SOUNDS}
    assert len(answers) == len(SOUNDS), "or the other tests would prove nothing"


@pytest.mark.req("FEA-10")
def test_audio_that_starts_in_a_step_of_decodes_gives_its_own_output(
    heard: Heard, transcribe: Callable[..., Transcriber]
) -> None:
    rows = transcribe(heard)
    rows.start({0: SOUNDS[0], 3: SOUNDS[1]})
    rows.step()
    rows.start({1: SOUNDS[2]})
    rows.step()
    rows.start({2: SOUNDS[3]})
    rows.finish(range(4))
    wanted = [heard.answer(SOUNDS[index]) for index in (0, 2, 3, 1)]
    assert_greedy_equal(rows.answers(range(4)), wanted)


@pytest.mark.req("FEA-10")
def test_a_preempted_request_is_encoded_again_and_continues(
    heard: Heard, transcribe: Callable[..., Transcriber]
) -> None:
    """Its blocks are freed, and another request takes its row first."""
    rows = transcribe(heard)
    rows.start({0: SOUNDS[0], 1: SOUNDS[1]})
    for _ in range(6):
        rows.step()
    rows.step(finished=[0])
    begun = rows.tokens.pop(0)
    assert len(begun) == 7
    rows.start({0: SOUNDS[2]})
    rows.tokens[3] = begun
    rows.start({3: SOUNDS[0]})
    rows.finish([0, 1, 3])
    wanted = [heard.answer(SOUNDS[index]) for index in (2, 1, 0)]
    assert_greedy_equal(rows.answers([0, 1, 3]), wanted)


def test_all_chunks_of_a_prompt_attend_to_the_audio(
    heard: Heard, transcribe: Callable[..., Transcriber]
) -> None:
    rows = transcribe(heard)
    rows.start({1: SOUNDS[1]})
    rows.start({0: SOUNDS[0]}, prompt=LONG_PROMPT, scheduled={0: 18})
    for count in (1, 14):
        rows.step({0: count})
    rows.step({0: len(LONG_PROMPT) - 33})
    rows.finish([0, 1])
    wanted = [heard.answer(SOUNDS[0], LONG_PROMPT), heard.answer(SOUNDS[1])]
    assert_greedy_equal(rows.answers([0, 1]), wanted)


def test_a_rewind_does_not_affect_the_encoder_tokens(
    heard: Heard, transcribe: Callable[..., Transcriber]
) -> None:
    rows = transcribe(heard)
    rows.start({0: SOUNDS[0]})
    for _ in range(5):
        rows.step()
    back = Rewind(row=0, num_computed_tokens=0, num_known_tokens=8)
    del rows.tokens[0][-2:]
    plan = rows.step({0: 8}, rewound=[back])
    assert not plan.encoder_inputs
    rows.finish([0])
    assert_greedy_equal(rows.answers([0]), [heard.answer(SOUNDS[0])])


@pytest.mark.req("FEA-10", "KVM-11")
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_outputs_are_correct_when_a_small_pool_causes_preemptions(
    max_steps_in_flight: int, heard: Heard
) -> None:
    """The pool holds only the longest request, whose 6 blocks and 4 encoder blocks are enough to
    start two; one item is encoded per step. Free blocks are set to NaN between the steps."""
    with ServedModel(
        heard.path,
        num_tokens=40,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=16,
        num_blocks=1 + 10,
        num_encoder_tokens=NUM_ENCODER_TOKENS,
        max_steps_in_flight=max_steps_in_flight,
    ) as served:
        for samples in SOUNDS:
            served.add(PROMPT, audio(samples, NUM_ENCODER_TOKENS))
        while served.step():
            if max_steps_in_flight == 1:
                served.poison_free_blocks()
        served.scheduler.check()
        assert any(ended.num_preemptions for ended in served.ended.values())
        assert not any(ended.num_cached_tokens for ended in served.ended.values())
    wanted = [heard.answer(samples, num_tokens=40) for samples in SOUNDS]
    assert_greedy_equal(served.tokens, wanted)


@pytest.mark.parametrize(
    "settings", [{"cpu_kernels": "torch"}, {"block_size": 32}, {"threads": 2}], ids=str
)
def test_answers_do_not_depend_on_kernels_or_blocks(
    settings: dict[str, Any], plain: Heard, transcribe: Callable[..., Transcriber]
) -> None:
    rows = transcribe(plain, **settings)
    rows.planner.block_size = settings.get("block_size", BLOCK_SIZE)
    rows.start({0: SOUNDS[0], 3: SOUNDS[1]})
    rows.start({1: SOUNDS[2]})
    rows.finish([0, 1, 3])
    wanted = [plain.answer(SOUNDS[index]) for index in (0, 2, 1)]
    assert_greedy_equal(rows.answers([0, 1, 3]), wanted)


def test_nan_samples_become_silence(plain: Heard, transcribe: Callable[..., Transcriber]) -> None:
    broken, silenced = SOUNDS[0].copy(), SOUNDS[0].copy()
    broken[4_000:8_000] = [np.nan, np.inf, -np.inf, np.nan] * 1_000
    silenced[4_000:8_000] = 0
    rows = transcribe(plain)
    rows.start({0: broken, 1: np.tile(SOUNDS[3], 3), 2: SOUNDS[0][:0]})
    rows.finish([0, 1, 2])
    wanted = [plain.answer(samples) for samples in (silenced, SOUNDS[3], np.zeros_like(broken))]
    assert_greedy_equal(rows.answers([0, 1, 2]), wanted)


def test_too_loud_audio_is_clipped_and_does_not_affect_other_requests(
    plain: Heard, transcribe: Callable[..., Transcriber]
) -> None:
    rows = transcribe(plain)
    rows.start({0: 1e30 * SOUNDS[0], 1: SOUNDS[1]})
    rows.finish([0, 1])  # no step may report non-finite logits
    assert_greedy_equal(rows.answers([1]), [plain.answer(SOUNDS[1])])


@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
def test_the_log_says_what_computes_cross_attention(
    cpu_kernels: str,
    plain: Heard,
    transcribe: Callable[..., Transcriber],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("DEBUG"):
        transcribe(plain, cpu_kernels=cpu_kernels)
    own, cross = (text for text in caplog.messages if text.startswith("attention: "))
    assert "num_heads=4" in own
    assert cross == own.replace("attention: ", "attention: cross attention, ", 1)


def test_two_shards_give_the_tokens_of_transformers(heard: Heard) -> None:
    def run(places: list[Parallel]) -> list[list[int]]:
        model = PagedModel(heard.path, max_model_len=MAX_LEN, parallel=places[0])
        answers = []
        for samples in SOUNDS:
            model.hear(padded(samples))
            answers.append(greedy([model], PROMPT, NUM_TOKENS))
        return answers

    wanted = [heard.answer(samples) for samples in SOUNDS]
    for answers in on_every_rank(2, 1, run):
        assert_greedy_equal(answers, wanted)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_logits_of_every_shard_equal_those_of_transformers(heard: Heard, num_shards: int) -> None:
    def run(places: list[Parallel]) -> torch.Tensor:
        model = PagedModel(heard.path, max_model_len=MAX_LEN, parallel=places[0])
        model.hear(padded(SOUNDS[0]))
        return forward_logits([model], LONG_PROMPT)

    wanted = heard.logits(SOUNDS[0], LONG_PROMPT)
    assert wanted.std() > 0.1, "a flat reference would prove nothing"
    for got in on_every_rank(num_shards, 1, run):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_a_shard_holds_its_part_of_every_matrix(plain: Heard) -> None:
    def sizes(places: list[Parallel]) -> dict[str, int]:
        model = PagedModel(plain.path, max_model_len=MAX_LEN, parallel=places[0]).model
        return {
            name: sum(place.numel() for place, _ in stored.parts)
            for name, stored in model.checkpoint_tensors().items()
        }

    (alone,) = on_every_rank(1, 1, sizes)
    shards = on_every_rank(2, 1, sizes)
    held_by_all = ("norm.weight", "norm.bias", "embed_positions.weight")
    for name, size in alone.items():
        if not name.endswith(held_by_all) and ".conv" not in name:
            assert sum(shard[name] for shard in shards) == size, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_logits_stay_as_near_the_exact_ones_as_transformers_own(
    dtype: torch.dtype, heard: Heard
) -> None:
    model = PagedModel(heard.path, max_model_len=MAX_LEN, dtype=dtype)
    rounded = copy.deepcopy(heard.reference).to(dtype)
    ours, theirs = [], []
    for samples in SOUNDS:
        exact = heard.logits(samples, LONG_PROMPT)
        model.hear(padded(samples))
        ours.append((forward_logits([model], LONG_PROMPT) - exact).abs().mean())
        features = input_features(heard.path, samples).to(dtype)
        with torch.inference_mode():
            given = rounded(
                input_features=features, decoder_input_ids=torch.tensor([LONG_PROMPT])
            ).logits[0]
        theirs.append((given.float() - exact).abs().mean())
    assert sum(ours) < 1.5 * sum(theirs)


def test_the_reference_answers_what_generate_does(plain: Heard) -> None:
    samples = SOUNDS[0]
    ids = plain.reference.generate(
        input_features(plain.path, samples),
        decoder_input_ids=torch.tensor([PROMPT]),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    assert ids[0].tolist()[-NUM_TOKENS:] == plain.answer(samples).token_ids


@pytest.mark.req("KVM-11")
def test_blocks_of_cross_attention_have_the_bytes_that_its_heads_need(plain: Heard) -> None:
    """Float32; on two shards half of the heads."""
    config = WorkerConfig(model=str(plain.path), num_blocks=NUM_BLOCKS, show_progress=False)
    with Worker(config) as worker:
        own, cross = worker.kv_cache.groups
        report = report_on(worker.kv_cache.groups, NUM_BLOCKS, LongestRequest(MAX_LEN, 64))
    assert isinstance(own.spec, FullAttentionSpec)
    assert isinstance(cross.spec, CrossAttentionSpec)
    # 2 layers, keys and values of 16 tokens, 4 heads of 16 elements of 4 bytes
    assert cross.block_size_bytes == own.block_size_bytes == 2 * 2 * 16 * 4 * 16 * 4 == 16_384
    assert report.block_bytes == 16_384
    # 96 tokens of a request fill 6 blocks; 50 encoder tokens need 4
    assert [group.max_blocks for group in report.groups] == [6, 4]
    assert report.groups[1].kind == "cross attention to 50"
    assert report.max_concurrency == (NUM_BLOCKS - 1) / 10
    (halves,) = {
        group.block_size_bytes
        for group in PagedModel(
            plain.path, max_model_len=MAX_LEN, parallel=Parallel(num_shards=2)
        )._groups
    }
    assert halves == 8_192


def test_pipeline_stages_are_rejected_by_name(plain: Heard) -> None:
    with pytest.raises(UnsupportedModel, match=r"pipeline_parallel_size=2: models with an enc"):
        PagedModel(plain.path, parallel=Parallel(num_stages=2))


def test_heads_that_cannot_be_cut_are_rejected_by_name(plain: Heard) -> None:
    with pytest.raises(UnsupportedModel, match="encoder_attention_heads=4, encoder_ffn_dim=96"):
        read_model_config(plain.path).check_split(num_shards=64)


def test_the_config_has_the_limits_of_audio_input(plain: Heard) -> None:
    config = read_model_config(plain.path)
    assert (config.max_encoder_tokens, config.max_audio_samples) == (50, 16_000)
    assert (config.sampling_rate, config.max_supported_len) == (16_000, 96)


def test_keys_and_values_of_an_encoder_are_not_kept_in_fp8(plain: Heard) -> None:
    config = WorkerConfig(model=str(plain.path), num_blocks=60, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(UnsupportedModel, match="cross attention"):
        Worker(config)


def edited(heard: Heard, folder: Path, file_name: str, changes: dict[str, object]) -> Path:
    """A copy of the checkpoint's settings with changes."""
    for name in ("config.json", "preprocessor_config.json"):
        values = json.loads((heard.path / name).read_text())
        values |= changes if name == file_name else {}
        (folder / name).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("file_name", "changes", "error", "reason"),
    [
        ("config.json", {"scale_embedding": True}, UnsupportedModel, "embeddings are not scaled"),
        ("config.json", {"activation_function": "relu"}, UnsupportedModel, "'relu'"),
        ("config.json", {"d_model": 66}, BrokenCheckpoint, "multiple of 4 attention heads"),
        ("config.json", {"max_source_positions": 60}, BrokenCheckpoint, "1.2: max_source_pos"),
        ("preprocessor_config.json", {"feature_size": 128}, BrokenCheckpoint, "num_mel_bins=80"),
        ("preprocessor_config.json", {"dither": 0.1}, UnsupportedModel, "noise"),
        ("preprocessor_config.json", {"padding_value": 1.0}, UnsupportedModel, "silence"),
        ("preprocessor_config.json", {"chunk_length": 30}, BrokenCheckpoint, "chunk_length=30"),
        ("preprocessor_config.json", {"chunk_length": 1e308}, BrokenCheckpoint, "chunk_length=1e"),
        ("preprocessor_config.json", {"chunk_length": math.inf}, BrokenCheckpoint, "a number from"),
        ("preprocessor_config.json", {"chunk_length": 10**400}, BrokenCheckpoint, "a number from"),
        ("preprocessor_config.json", {"n_fft": 32_000}, BrokenCheckpoint, "twice the 16000 samp"),
    ],
)
def test_settings_that_cannot_be_served_are_rejected_by_name(
    file_name: str,
    changes: dict[str, object],
    error: type[Exception],
    reason: str,
    plain: Heard,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=reason):
        read_model_config(edited(plain, tmp_path, file_name, changes))


def test_audio_settings_are_found_in_every_file_of_transformers(
    plain: Heard, tmp_path: Path
) -> None:
    wanted = read_model_config(plain.path)
    folder = edited(plain, tmp_path, "config.json", {})
    given = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    assert read_model_config(folder) == wanted, "as they are by default"
    changed = {"feature_extractor": given | {"chunk_length": 2, "hop_length": 320}}
    (folder / "processor_config.json").write_text(json.dumps(changed))
    assert read_model_config(folder).max_audio_samples == 32_000
