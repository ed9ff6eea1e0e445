"""Engines of several worker processes give the tokens of one, and all processes end when one
ends."""

import gc
import io
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from longshore import LLM, BeamSearchParams, SamplingParams
from longshore.deploy.llm.outputs import RequestOutput
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.settings.options import engine_options
from longshore.deploy.supervisor import supervisor
from longshore.deploy.supervisor.engine_config import engine_processes
from longshore.deploy.supervisor.engine_plan import plan_engine
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.supervisor import StartFailed, Supervisor
from longshore.protocol.errors import ConfigError, EngineDead
from longshore.worker.loading.quantise import Scheme, quantise
from longshore.worker.models.families import read_model_config
from tests.conftest import TESTS
from tests.gguf.writing import changed
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, wait_until
from tests.integration.test_process_life import assert_same, open_stream, rest_of
from tests.models import make_tiny_llama
from tests.reference import ReferenceAnswer, assert_greedy_equal, greedy_reference

NUM_TOKENS = 16
NUM_STREAMED = 300  # so many that no stream ends before a process is killed
RANK_TIMEOUT_S = 5.0  # longer than other work may delay a rank
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
NO_GATES = {"watermark": 0.0, "preempt_threshold": 1.0, "admit_threshold": 1.0}

TENSOR_2: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES_2: dict[str, Any] = {"pipeline_parallel_size": 2}
BOTH: dict[str, Any] = {**TENSOR_2, **STAGES_2}
OFFLOADING: dict[str, Any] = {
    "kv_connector": "offloading",
    "kv_connector_config": '{"cpu_bytes_to_use": "64MiB"}',
}
LAYOUTS = [
    pytest.param(TENSOR_2, id="2 shards", marks=pytest.mark.slow),
    pytest.param(STAGES_2, id="2 stages", marks=pytest.mark.slow),
    pytest.param(BOTH, id="2 x 2"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Three layers, so that stages differ."""
    path = tmp_path_factory.mktemp("tiny-llama")
    return path, make_tiny_llama(path, num_hidden_layers=3)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Ragged prompts; every third continues a common prefix."""
    rng = random.Random(0)
    common = [rng.randrange(128) for _ in range(70)]
    return [
        (common if index % 3 == 0 else []) + [rng.randrange(128) for _ in range(1 + 3 * index)]
        for index in range(20)
    ]


@pytest.fixture(scope="module")
def references(checkpoint: tuple[Path, Any], prompts: list[list[int]]) -> list[ReferenceAnswer]:
    return [greedy_reference(checkpoint[1], prompt, NUM_TOKENS) for prompt in prompts]


def make_llm(model_dir: Path, **settings: Any) -> LLM:
    settings = {"num_blocks": 400, "max_num_seqs": 32, "threads": 1, **settings}
    return LLM(model_dir, device="cpu", dtype="float32", **settings)


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Any = GREEDY
) -> list[RequestOutput]:
    return llm.generate(
        [{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False
    )


@pytest.fixture(scope="module", params=LAYOUTS)
def llm(request: pytest.FixtureRequest, checkpoint: tuple[Path, Any]) -> Iterator[LLM]:
    with make_llm(checkpoint[0], verify_plan=True, **request.param) as made:
        yield made


@pytest.fixture(scope="module")
def one_rank(checkpoint: tuple[Path, Any]) -> Iterator[LLM]:
    """Prompts are computed in chunks, unlike in the other tests."""
    with make_llm(checkpoint[0], in_process=True, max_num_batched_tokens=40) as made:
        yield made


@pytest.mark.req("FEA-07")
def test_ragged_batch_and_prefix_hits_equal_the_reference(
    llm: LLM, prompts: list[list[int]], references: list[ReferenceAnswer]
) -> None:
    for _ in range(2):
        outputs = generate(llm, prompts)
        assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references)
    assert all(
        output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
        for prompt, output in zip(prompts, outputs, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ("worker/loading/quantised/llama-gptq_asym_actorder", "auto"),
        ("gguf/llama.gguf", "auto"),
        ("int4", "int8"),
    ],
)
def test_quantised_weights_are_divided_among_workers(
    model: str, weights: str, tmp_path: Path
) -> None:
    """Each reads its part of the packed tensors."""
    path = TESTS / model
    if path.suffix == ".gguf":
        path = changed(path, tmp_path / path.name, quantise=True)
    elif model == "int4":  # inputs are rounded alike where each worker has whole groups
        source, path = tmp_path / "source", tmp_path / "model"
        make_tiny_llama(source, hidden_size=64, intermediate_size=128)
        path.mkdir()
        quantise(source, read_model_config(source), Scheme("int4", 32), path, show_progress=False)
    prompts = [[5, 9, 3, 17, 4], [11, 30], list(range(1, 31))]
    found = []
    for settings in ({"in_process": True}, TENSOR_2):
        with make_llm(path, quantised_weights=weights, **settings) as llm:
            found.append([output.outputs[0].token_ids for output in generate(llm, prompts)])
    assert found[0] == found[1]


def test_a_request_alone_equals_the_reference(
    llm: LLM, prompts: list[list[int]], references: list[ReferenceAnswer]
) -> None:
    outputs = [generate(llm, [prompt])[0] for prompt in prompts[:3]]
    assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references[:3])


def test_sampled_tokens_are_those_of_one_rank(
    llm: LLM, one_rank: LLM, prompts: list[list[int]]
) -> None:
    params = [
        SamplingParams(
            temperature=0.9,
            top_k=20 if index % 2 else 0,
            repetition_penalty=1.2 if index % 3 else 1.0,
            presence_penalty=0.5 if index % 5 == 1 else 0.0,
            logit_bias={50: 2.0} if index % 5 == 2 else {},
            bad_words_token_ids=((50, 51), (52,)) if index % 5 == 3 else (),
            seed=index,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
        )
        for index in range(len(prompts))
    ]
    wanted = [output.outputs[0].token_ids for output in generate(one_rank, prompts, params)]
    assert [output.outputs[0].token_ids for output in generate(llm, prompts, params)] == wanted


def test_an_interrupt_aborts_and_leaves_all_ranks_in_step(
    llm: LLM, prompts: list[list[int]], references: list[ReferenceAnswer]
) -> None:
    gc.collect()  # an interrupt during a finalizer of some library would only be reported
    threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [[5 + n % 100] for n in range(1000)], long)
    outputs = generate(llm, prompts)
    assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references)


def test_chunks_and_preemptions_change_no_token_in_two_stages(
    checkpoint: tuple[Path, Any],
    prompts: list[list[int]],
    references: list[ReferenceAnswer],
) -> None:
    """On two shards: Llama in test_families.py."""
    with make_llm(
        checkpoint[0], num_blocks=25, max_num_batched_tokens=37, **NO_GATES, **STAGES_2
    ) as llm:
        outputs = generate(llm, prompts)
    assert sum(output.outputs[0].num_preemptions for output in outputs) > 5
    assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references)


def test_beams_are_those_of_one_rank(llm: LLM, one_rank: LLM, prompts: list[list[int]]) -> None:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts[:4]]
    found = [
        each.beam_search(inputs, BeamSearchParams(beam_width=3, max_tokens=6))
        for each in (llm, one_rank)
    ]
    ours, alone = (
        [[beam.tokens for beam in output.sequences] for output in each] for each in found
    )
    assert ours == alone


def test_logprobs_are_those_of_one_rank(llm: LLM, one_rank: LLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=12,
        logprobs=2,
        prompt_logprobs=1,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        logit_bias={50: 2.0},
        bad_words_token_ids=((50, 51), (52,)),
        ignore_eos=True,
    )
    scored = [generate(each, prompts[:6], params) for each in (llm, one_rank)]
    for ours, alone in zip(*scored, strict=True):
        assert ours.outputs[0].token_ids == alone.outputs[0].token_ids
        _assert_close(ours.outputs[0].logprobs, alone.outputs[0].logprobs)
        _assert_close(ours.prompt_logprobs, alone.prompt_logprobs)


def _assert_close(ours: Any, alone: Any) -> None:
    assert len(ours) == len(alone) > 0
    for here, there in zip(ours, alone, strict=True):
        assert (here is None) == (there is None)
        if here is not None:
            assert here.keys() == there.keys()
            assert [entry.logprob for entry in here.values()] == pytest.approx(
                [entry.logprob for entry in there.values()], abs=1e-4
            )


# Starting and ending


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging rank does not end when asked to, and is soon killed."""
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_S", 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TENSOR_2, id="2 shards", marks=pytest.mark.long),
        pytest.param(STAGES_2, id="2 stages", marks=pytest.mark.long),
        pytest.param(BOTH, id="2 x 2"),
    ],
)
def test_sigterm_lets_a_live_stream_finish_and_every_rank_exits_well(
    start_deployment: StartDeployment, layout: dict[str, Any]
) -> None:
    deployment = start_deployment(*flags(layout), "--log-level", "debug").wait_until_ready()
    num_ranks = len(deployment.members) - 3
    assert num_ranks == (4 if layout is BOTH else 2)
    output = deployment.output
    for rank in range(num_ranks):
        for doing in ("waiting for the other", "loading", "warming up"):
            assert any(f"worker {rank}: {doing}" in line for line in output.splitlines())
    ready = output.index("ready at")
    assert output.rindex("warming up") < ready, "who is ready has warmed up"
    stream = open_stream(deployment, 300)
    deployment.process.terminate()
    *_, last = stream
    assert last.usage.completion_tokens == 300
    assert deployment.process.wait(timeout=PATIENCE_S) == 0, deployment.output
    assert "Traceback" not in deployment.output
    deployment.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        pytest.param(TENSOR_2, 0, id="shard 0", marks=pytest.mark.long),
        pytest.param(TENSOR_2, 1, id="shard 1"),
        pytest.param(STAGES_2, 0, id="stage 0", marks=pytest.mark.long),
        pytest.param(STAGES_2, 1, id="stage 1", marks=pytest.mark.long),
    ],
)
def test_streams_go_on_with_new_ranks_when_one_is_killed(
    start_deployment: StartDeployment, layout: dict[str, Any], victim: int
) -> None:
    deployment = start_deployment(*flags(layout), "--dtype", "float32").wait_until_ready()
    expected = rest_of(open_stream(deployment, NUM_STREAMED), NUM_STREAMED)
    stream = open_stream(deployment, NUM_STREAMED)
    former = dict(deployment.members)
    former[f"worker-{victim}"].kill()
    assert_same(rest_of(stream, NUM_STREAMED), expected)
    assert f"worker {victim} was killed (SIGKILL)" in deployment.output
    deployment.find_members()
    members = deployment.members
    replaced = {name for name, member in members.items() if member.pid != former[name].pid}
    assert replaced == {"worker-0", "worker-1"}
    assert "Traceback" not in deployment.output
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TENSOR_2, id="2 shards", marks=pytest.mark.long),
        pytest.param(STAGES_2, id="2 stages", marks=pytest.mark.long),
        pytest.param(BOTH, id="2 x 2", marks=pytest.mark.long),
        pytest.param({**TENSOR_2, **OFFLOADING}, id="offloading"),
    ],
)
def test_streams_go_on_with_the_same_ranks_when_their_scheduler_is_killed(
    start_deployment: StartDeployment, layout: dict[str, Any]
) -> None:
    """Tensor parallel ranks wait for each other in each layer, so they must lose it together."""
    deployment = start_deployment(*flags(layout), "--dtype", "float32", "--verify-plan")
    deployment.wait_until_ready()
    expected = rest_of(open_stream(deployment, NUM_STREAMED), NUM_STREAMED)
    streams = [open_stream(deployment, NUM_STREAMED) for _ in range(4)]
    former = dict(deployment.members)
    former["scheduler"].kill()
    for stream in streams:
        assert_same(rest_of(stream, NUM_STREAMED), expected)
    deployment.find_members()
    members = deployment.members
    replaced = {name for name, member in members.items() if member.pid != former[name].pid}
    assert replaced == {"scheduler"}
    assert "Traceback" not in deployment.output
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()


@pytest.mark.slow
def test_a_rank_that_hangs_when_the_scheduler_dies_is_replaced(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment(*flags(TENSOR_2), "--dtype", "float32", "--hang-timeout-s", "8")
    deployment.wait_until_ready()
    expected = rest_of(open_stream(deployment, NUM_STREAMED), NUM_STREAMED)
    stream = open_stream(deployment, NUM_STREAMED)
    former = dict(deployment.members)
    former["worker-1"].suspend()
    former["scheduler"].kill()
    assert_same(rest_of(stream, NUM_STREAMED), expected)
    deployment.find_members()
    members = deployment.members
    replaced = {name for name, member in members.items() if member.pid != former[name].pid}
    assert replaced == {"scheduler", "worker-0", "worker-1"}
    assert "worker 1 hangs or is stopped" in deployment.output
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TENSOR_2, id="2 shards"),
        pytest.param(STAGES_2, id="2 stages", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_hangs_ends_the_engine_within_the_timeout_with_a_reason(
    checkpoint: tuple[Path, Any], layout: dict[str, Any], impatient: None
) -> None:
    before = psutil.Process().children()
    with make_llm(checkpoint[0], rank_timeout_s=RANK_TIMEOUT_S, **layout) as llm:
        children = [child for child in psutil.Process().children() if child not in before]
        (hung,) = (child for child in children if child.cmdline()[-1].endswith("worker-0.json"))
        generate(llm, [[1, 2, 3]])
        hung.suspend()
        with pytest.raises(EngineDead, match=r"worker 1: .*rank 1 has lost .* rank_timeout_s"):
            generate(llm, [[1, 2, 3]])
    assert not any(child.is_running() for child in children)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TENSOR_2, id="2 shards", marks=pytest.mark.long),
        pytest.param(STAGES_2, id="2 stages"),
    ],
)
def test_a_sampling_or_last_rank_that_hangs_is_noticed_although_nobody_waits_for_it(
    checkpoint: tuple[Path, Any], layout: dict[str, Any], impatient: None
) -> None:
    before = psutil.Process().children()
    with make_llm(checkpoint[0], rank_timeout_s=RANK_TIMEOUT_S, **layout) as llm:
        children = [child for child in psutil.Process().children() if child not in before]
        (hung,) = (child for child in children if child.cmdline()[-1].endswith("worker-1.json"))
        generate(llm, [[1, 2, 3]])
        hung.suspend()
        with pytest.raises(EngineDead, match=r"rank_timeout_s"):
            generate(llm, [[1, 2, 3]])
    assert not any(child.is_running() for child in children)


def test_a_rank_that_cannot_load_is_the_reason_that_none_starts(
    checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    output = io.StringIO()
    options = engine_options(
        {"num_blocks": 400, "device": "cpu", "threads": 1, "log_level": "warning", **TENSOR_2}
    )
    plan = plan_engine(options, read_model_folder(checkpoint[0]))
    with Supervisor(RuntimeDir(), output) as starting:
        specs, _ = engine_processes(plan, starting.runtime_dir)
        worker = replace(specs[1].config.worker, model=str(tmp_path / "nowhere"))
        config = msgspec.structs.replace(specs[1].config, worker=worker)
        specs[1] = msgspec.structs.replace(specs[1], config=config)
        with pytest.raises(StartFailed, match=r"^worker 1: .*nowhere.*config\.json does not exist"):
            starting.start(specs, timeout_s=60)
        assert not starting.runtime_dir.path.exists()


@pytest.mark.slow
def test_stop_while_ranks_wait_for_each_other_is_no_error(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment("--tensor-parallel-size", "2", "--log-level", "debug")
    wait_until(lambda: "waiting for the other" in deployment.output)
    children = deployment.process.children()
    assert deployment.stop() == 0, deployment.output
    assert not any(child.is_running() for child in children)
    wait_until(lambda: deployment.runtime_dirs == [])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 cannot cut num_attention_heads=4"),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size=4 is more than the 3 layers"),
        ({"tensor_parallel_size": 2, "in_process": True}, "in_process with tensor_parallel_size=2"),
        (
            {**STAGES_2, "async_scheduling": True},
            "async_scheduling is not supported with pipeline_parallel_size=2",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
    ],
)
def test_what_ranks_cannot_do_is_rejected_by_name_before_anything_starts(
    checkpoint: tuple[Path, Any], settings: dict[str, Any], words: str
) -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=words):
        make_llm(checkpoint[0], **settings)
    assert psutil.Process().children() == before


def flags(layout: dict[str, Any]) -> list[str]:
    return [
        text
        for name, value in layout.items()
        for text in ("--" + name.replace("_", "-"), str(value))
    ]
