"""The settings of every component, derived from a user's settings."""

import json
import logging
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.deploy.cli.cache_plan import plan as plan_cache
from longshore.deploy.cli.client_options import CachePlanOptions
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.settings.options import (
    EngineOptions,
    ServeOptions,
    engine_options,
)
from longshore.deploy.supervisor.engine_config import engine_processes, worker_config
from longshore.deploy.supervisor.engine_plan import EnginePlan, check_host, plan_engine
from longshore.deploy.supervisor.replica import Replica, replicas
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.protocol.errors import ConfigError
from longshore.scheduler.config import SchedulerProcessConfig
from longshore.worker.process.byte_size import byte_size

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
KNOWN_CONNECTOR = "example"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


QUANTISED = Path(__file__).parents[2] / "worker/loading/quantised/llama-gptq"


def test_what_the_weights_cost_when_dequantised_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    check_host(plan(QUANTISED, quantization="gptq", dtype="float32", state_dir=tmp_path))
    file_size = byte_size((QUANTISED / "model.safetensors").stat().st_size)
    assert f"stored as gptq and computed in float32: {file_size} in the files," in caplog.text


def test_weights_must_be_quantised_as_the_settings_say(tmp_path: Path) -> None:
    for wanted in ("awq", "fp8"):
        with pytest.raises(ConfigError, match=f"quantization='{wanted}', .* are stored as gptq"):
            check_host(plan(QUANTISED, quantization=wanted, state_dir=tmp_path))


def plan(model_dir: Path, **settings: Any) -> EnginePlan:
    return plan_engine(EngineOptions(device="cpu", **settings), read_model_folder(model_dir))


def test_every_process_gets_the_same_identity(model_dir: Path) -> None:
    runtime_dir = RuntimeDir()
    try:
        engine = plan(model_dir, num_blocks=40, async_scheduling=False, max_num_seqs=4)
        (worker, scheduler), clients = engine_processes(engine, runtime_dir)
    finally:
        runtime_dir.remove()
    assert (worker.name, scheduler.name) == ("worker 0", "scheduler")
    assert worker.config.identity == scheduler.config.identity == engine.identity  # type: ignore[attr-defined]
    assert scheduler.config.scheduler.max_steps_in_flight == 1  # type: ignore[attr-defined]
    assert clients == scheduler.config.clients  # type: ignore[attr-defined]
    assert worker_config(engine).num_blocks == 40
    assert engine.hash_seed.hex() not in str(worker.config)


def test_an_encoder_computes_whole_prompts_without_the_prefix_cache(model_dir: Path) -> None:
    encoder = {**CONFIG, "architectures": ["XLMRobertaModel"], "max_position_embeddings": 8194}
    (model_dir / "config.json").write_text(json.dumps(encoder))
    engine = plan(model_dir)
    assert not engine.scheduler.enable_chunked_prefill
    assert not engine.cache.enable_prefix_caching
    assert engine.scheduler.max_model_len == 8192
    assert engine.identity.max_num_batched_tokens == engine.scheduler.token_budget == 8192
    assert engine.model.embedding == EmbeddingModel(16, "cls", is_only=True)
    with pytest.raises(ConfigError, match="must fit into one step"):
        plan(model_dir, max_num_scheduled_tokens=512)
    with pytest.raises(ConfigError, match=f"kv_connector='{KNOWN_CONNECTOR}'.*Remove"):
        plan(model_dir, kv_connector=KNOWN_CONNECTOR)


def test_what_is_not_set_has_the_described_defaults(model_dir: Path) -> None:
    engine = plan(model_dir)
    scheduler, cache = engine.scheduler, engine.cache
    assert scheduler.token_budget == scheduler.max_num_batched_tokens == 2048
    assert (scheduler.max_num_seqs, scheduler.long_prefill_token_threshold) == (256, 0)
    assert (scheduler.enable_chunked_prefill, scheduler.scheduler_reserve_full_isl) == (True, False)
    assert (scheduler.policy, scheduler.max_steps_in_flight) == ("fcfs", 2)
    assert (scheduler.max_loras, scheduler.max_num_encoder_input_tokens) == (0, 0)
    assert (cache.block_size, cache.hash_block_size, cache.enable_prefix_caching) == (
        16,
        None,
        True,
    )
    assert (cache.watermark, cache.preempt_threshold, cache.admit_threshold) == (0.01, 0.95, 0.80)
    assert cache.enable_kv_cache_events is False
    assert len(engine.hash_seed) == 32


@pytest.mark.req("CFG-03")
@pytest.mark.parametrize("policy", ["fcfs", "priority", "continuum"])
def test_every_setting_reaches_the_scheduler(model_dir: Path, policy: str) -> None:
    scheduling = {
        "max_num_seqs": 5,
        "max_num_batched_tokens": 1000,
        "max_num_scheduled_tokens": 600,
        "long_prefill_token_threshold": 100,
        "scheduler_reserve_full_isl": True,
        "kv_role": "kv_consumer",
        "load_failure_policy": "fail",
        "load_timeout_s": 7.5,
        "max_loading_blocks": 9,
    }
    caching = {
        "block_size": 32,
        "num_blocks": 200,
        "hash_block_size": 16,
        "enable_prefix_caching": False,
        "watermark": 0.05,
        "preempt_threshold": 0.9,
        "admit_threshold": 0.7,
    }
    connecting = {"kv_connector": KNOWN_CONNECTOR, "kv_connector_config": '{"path":"x"}'}
    runtime_dir = RuntimeDir()
    try:
        settings = scheduling | caching | connecting
        engine = plan(model_dir, scheduling_policy=policy, async_scheduling=False, **settings)
        (_, scheduler), _ = engine_processes(engine, runtime_dir)
    finally:
        runtime_dir.remove()
    process = msgspec.json.decode(
        msgspec.json.encode(scheduler.config), type=SchedulerProcessConfig
    )
    assert {name: getattr(process.scheduler, name) for name in scheduling} == scheduling
    assert {name: getattr(process.cache, name) for name in caching} == caching
    assert {name: getattr(process, name) for name in connecting} == connecting
    assert (process.scheduler.policy, process.scheduler.max_steps_in_flight) == (policy, 1)
    assert bytes.fromhex(process.hash_seed) == engine.hash_seed


def test_verify_kv_is_an_option_of_the_connector(
    model_dir: Path,
) -> None:
    config = '{"cpu_bytes_to_use": "1MiB", "verify_kv": "never"}'
    settings: dict[str, Any] = {"kv_connector": "offloading", "kv_connector_config": config}
    assert plan(model_dir, **settings).connector_options["verify_kv"] == "never"
    chosen = plan(model_dir, **settings, verify_kv="always").connector_options
    assert chosen == {"cpu_bytes_to_use": "1MiB", "verify_kv": "always"}


@pytest.mark.parametrize("poison_kv", [False, True])
def test_poison_kv_reaches_the_workers(model_dir: Path, poison_kv: bool) -> None:
    assert worker_config(plan(model_dir, poison_kv=poison_kv)).poison_kv == poison_kv


def test_what_no_worker_can_do_yet_is_no_setting() -> None:
    offered = {field.name for field in fields(EngineOptions)}
    assert not offered & {
        "max_loras",
        "encoder_cache_size",
        "num_speculative_tokens",
        "num_lookahead_tokens",
    }


LAYOUT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}


def test_every_rank_is_a_process_that_knows_its_place(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    sizes = {"num_hidden_layers": 3, "intermediate_size": 16}
    (model_dir / "config.json").write_text(json.dumps(CONFIG | sizes))
    runtime_dir = RuntimeDir()
    try:
        engine = plan(model_dir, rank_timeout_s=7.0, startup_timeout_s=3600.0, **LAYOUT)
        (*workers, scheduler), _ = engine_processes(engine, runtime_dir)
    finally:
        runtime_dir.remove()
    assert [worker.name for worker in workers] == [f"worker {rank}" for rank in range(6)]
    configs: list[Any] = [worker.config for worker in workers]
    assert [config.rank for config in configs] == list(range(6))
    assert {config.worker.device for config in configs} == {"cpu"}
    (layout,) = {config.ranks for config in configs}
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size) == (2, 3)
    assert (layout.sampling_rank, layout.rank_timeout_s) == (4, 7.0)
    assert {config.ranks.startup_timeout_s for config in configs} == {3600.0}
    assert Path(layout.rendezvous).parent == runtime_dir.path
    config: Any = scheduler.config
    assert config.workers == tuple(config.endpoint for config in configs)
    assert config.sampling_rank == 4
    assert (config.scheduler.max_steps_in_flight, config.scheduler.feed_back_tokens) == (3, True)
    for worker in workers:
        assert worker.environment == {"OPENBLAS_NUM_THREADS": "1"}
        assert worker.late_environment == {
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
            "TORCHINDUCTOR_CACHE_DIR": str(runtime_dir.path / "torch"),
        }
        assert worker.stopped_by == scheduler.name


@pytest.mark.req("CRG-03")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("connector", "interface"), [("p2p_nccl", "=lo"), ("multi", "=lo"), ("nixl", None)]
)
def test_nccl_listens_only_on_the_interface_of_the_host(
    connector: str, interface: str | None, size: int, model_dir: Path
) -> None:
    children = [
        {"connector": "simple_cpu", "options": {"cpu_bytes_to_use": "1MiB"}},
        {"connector": "p2p_nccl"},
    ]
    config = {"connectors": children} if connector == "multi" else {}
    runtime_dir = RuntimeDir()
    try:
        engine = plan(
            model_dir,
            tensor_parallel_size=size,
            kv_connector=connector,
            kv_connector_config=json.dumps(config),
        )
        (worker, *_), _ = engine_processes(engine, runtime_dir)
    finally:
        runtime_dir.remove()
    if interface is None and size > 1:
        interface = "lo"
    assert worker.late_environment.get("NCCL_SOCKET_IFNAME") == interface


def test_standbys_have_the_place_of_their_worker_and_meet_each_other(model_dir: Path) -> None:
    runtime_dir = RuntimeDir()
    try:
        engine = plan(model_dir, tensor_parallel_size=2)
        (*workers, scheduler), _ = engine_processes(engine, runtime_dir, num_standbys=3)
    finally:
        runtime_dir.remove()
    assert [each.num_standbys for each in (*workers, scheduler)] == [3, 3, 0]
    meeting_places = set()
    for number in (0, 1):
        for worker in workers:
            assert worker.config_of_standby is not None
            config: Any = worker.config
            standby: Any = worker.config_of_standby(config, number)
            meeting_places.add((number, standby.ranks.rendezvous))
            assert standby.is_standby
            assert standby == msgspec.structs.replace(
                config,
                is_standby=True,
                ranks=replace(config.ranks, rendezvous=standby.ranks.rendezvous),
            )
    assert len(meeting_places) == len({path for _, path in meeting_places}) == 2


def test_ranks_on_gpus_have_one_each(model_dir: Path) -> None:
    runtime_dir = RuntimeDir()
    try:
        options = EngineOptions(device="cuda", tensor_parallel_size=2)
        engine = plan_engine(options, read_model_folder(model_dir))
        (*workers, scheduler), _ = engine_processes(engine, runtime_dir)
    finally:
        runtime_dir.remove()
    configs: list[Any] = [worker.config for worker in workers]
    assert [config.worker.device for config in configs] == ["cuda:0", "cuda:1"]
    assert scheduler.config.scheduler.max_steps_in_flight == 2  # type: ignore[attr-defined]
    assert not scheduler.config.scheduler.feed_back_tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_replicas_have_processes_sockets_and_gpus_of_their_own(
    model_dir: Path, device: str
) -> None:
    runtime_dir = RuntimeDir()
    try:
        options = EngineOptions(device=device, tensor_parallel_size=2)
        engine = plan_engine(options, read_model_folder(model_dir))
        started = [
            engine_processes(engine, runtime_dir, replica) for replica in replicas(("unified",) * 2)
        ]
    finally:
        runtime_dir.remove()
    specs = [spec for engine_specs, _ in started for spec in engine_specs]
    assert [spec.name for spec in specs] == [
        "worker 0.0", "worker 0.1", "scheduler 0", "worker 1.0", "worker 1.1", "scheduler 1",
    ]  # fmt: skip
    assert [spec.stopped_by for spec in specs] == 2 * ["scheduler 0"] + [None] + 2 * [
        "scheduler 1"
    ] + [None]
    configs: list[Any] = [spec.config for spec in specs]
    ranks = [*configs[:2], *configs[3:5]]
    assert len({config.endpoint for config in ranks}) == 4
    assert len({config.ranks.rendezvous for config in ranks}) == 2
    if device == "cuda":
        assert [config.worker.device for config in ranks] == [
            "cuda:0",
            "cuda:1",
            "cuda:2",
            "cuda:3",
        ]
        assert {config.worker.num_ranks_on_device for config in ranks} == {1}
    else:
        assert {config.worker.num_ranks_on_device for config in ranks} == {4}
    schedulers = [configs[2], configs[5]]
    assert [config.engine_id for config in schedulers] == ["engine-0", "engine-1"]
    assert [config.clients for config in schedulers] == [clients for _, clients in started]
    assert len({clients for _, clients in started}) == 2


def test_ranks_share_the_cpu_with_the_engines_of_their_host(model_dir: Path) -> None:
    runtime_dir = RuntimeDir()
    try:
        replica = Replica(0, 3, num_on_host=2)
        specs, _ = engine_processes(plan(model_dir, tensor_parallel_size=2), runtime_dir, replica)
    finally:
        runtime_dir.remove()
    configs: list[Any] = [spec.config for spec in specs[:2]]
    assert {config.worker.num_ranks_on_device for config in configs} == {4}


@pytest.mark.req("OUT-04")
def test_stages_and_asynchronous_scheduling_exclude_each_other(model_dir: Path) -> None:
    with pytest.raises(
        ConfigError, match="async_scheduling is not supported with pipeline_parallel_size=2"
    ):
        plan(model_dir, pipeline_parallel_size=2, async_scheduling=True)


@pytest.mark.req("HSH-07")
def test_starts_with_the_same_state_directory_have_the_same_hash_seed(
    model_dir: Path, tmp_path: Path
) -> None:
    first, again, other = (
        plan(model_dir, state_dir=tmp_path / name) for name in ("state", "state", "other")
    )
    assert first.hash_seed == again.hash_seed != other.hash_seed
    assert first.identity.hash_seed_digest == again.identity.hash_seed_digest
    assert first.identity.hash_seed_digest != other.identity.hash_seed_digest


def test_rejected_settings_create_no_state_directory(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        plan(model_dir, state_dir=tmp_path / "state", max_model_len=10_000)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({}, 512),
        ({"num_blocks": 11}, 160),
        ({"num_blocks": 1000}, 512),
        ({"max_model_len": 100}, 100),
    ],
)
def test_length_is_the_model_s_cut_to_the_blocks_unless_asked(
    model_dir: Path, settings: dict[str, int], length: int
) -> None:
    assert plan(model_dir, **settings).identity.max_model_len == length


def test_length_beyond_the_model_is_rejected_with_both_numbers(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=513.*512 tokens"):
        plan(model_dir, max_model_len=513)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "tpu"}, "device='tpu'.*cpu, cuda"),
        ({"dtype": "int8"}, "dtype='int8'.*float32, bfloat16, float16"),
        ({"scheduling_policy": "random"}, "scheduling_policy='random'.*fcfs, priority, continuum"),
        ({"scheduling_policy": "no_such:Policy"}, "scheduling_policy='no_such:Policy'.*no_such"),
        ({"max_num_scheduled_tokens": 4096}, "max_num_scheduled_tokens=4096.*2048"),
        ({"max_num_scheduled_tokens": 0}, "max_num_scheduled_tokens=0"),
        ({"hash_block_size": 5}, "hash_block_size=5.*block_size=16"),
        ({"watermark": 1}, "watermark=1"),
        ({"watermark": math.nan}, "watermark=nan"),
        ({"preempt_threshold": 1.5}, "preempt_threshold=1.5"),
        ({"admit_threshold": 0.96}, "admit_threshold=0.96.*preempt_threshold=0.95"),
        ({"kv_role": "kv_hope"}, "kv_role='kv_hope'.*kv_both, kv_producer, kv_consumer"),
        ({"kv_role": "kv_producer"}, "kv_role='kv_producer' is set, but kv_connector is not"),
        ({"load_failure_policy": "hope"}, "load_failure_policy='hope'.*recompute, fail"),
        ({"load_timeout_s": math.inf}, "load_timeout_s=inf"),
        ({"load_timeout_s": 0}, "load_timeout_s=0"),
        ({"max_loading_blocks": 0}, "max_loading_blocks=0"),
        (
            {"kv_connector_config": '{"a": 1}'},
            "kv_connector_config is set, but kv_connector is not",
        ),
        (
            {"kv_connector": "c", "kv_connector_config": "[1]"},
            "is neither a JSON object",
        ),
        (
            {"kv_connector": "c", "kv_connector_config": "{"},
            "is neither a JSON object",
        ),
        ({"verify_kv": "perhaps", "kv_connector": "offloading"}, "verify_kv='perhaps'.*always"),
        ({"verify_kv": "always"}, "verify_kv is set, but kv_connector is not"),
        (
            {"kv_connector": "simple_cpu", "verify_kv": "always"},
            "--verify-kv is not an option of --kv-connector simple_cpu",
        ),
        (
            {"kv_connector": "multi", "verify_kv": "never"},
            "--kv-connector multi.*options of its connectors",
        ),
        (
            {"kv_connector": "offloading", "kv_connector_config": '{"cpu_bytes": "8GiB"}'},
            "no option 'cpu_bytes'; its options are cpu_bytes_to_use",
        ),
        ({"kv_connector": "simple_cpu"}, "simple_cpu needs 'cpu_bytes_to_use'"),
        ({"kv_connector": "unheard-of"}, "--kv-connector unheard-of is unknown"),
        ({"kv_connector": "no_such:Connector"}, "there is no module no_such"),
        ({"num_blocks": 0}, "num_blocks=0"),
        (
            {"num_blocks": 11, "max_model_len": 300},
            "num_blocks=11 are too few.*max_model_len=300 tokens needs 20,.*lower max_model_len.$",
        ),
        ({"block_size": 12}, "block_size=12.*power of two"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"threads": 0}, "threads=0"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 cannot cut num_attention_heads=2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is more than the 1 layers"),
        ({"tensor_parallel_size": 2}, "in_process with tensor_parallel_size=2"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "device='cuda:1' selects one GPU"),
        ({"rank_timeout_s": 0}, "rank_timeout_s=0"),
        ({"kv_memory_fraction": 1.5}, "kv_memory_fraction=1.5"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization=0.0"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1"),
        ({"log_level": "loud"}, "log_level='loud'.*debug, info"),
        ({"startup_timeout_s": 0}, "startup_timeout_s=0"),
        ({"num_bloks": 5}, "num_bloks.*num_blocks"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "chunked prefill"),
    ],
)
def test_wrong_setting_is_rejected_by_name(
    model_dir: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        worker_config(plan_engine(engine_options(settings), read_model_folder(model_dir)))


def test_a_share_of_a_gpus_memory_is_a_warning_on_a_cpu(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = engine_options({"gpu_memory_utilization": 0.9, "device": "cpu"})
    plan = plan_engine(options, read_model_folder(model_dir))
    worker_config(plan)
    assert "gpu_memory_utilization=0.9 has no effect on a CPU" in caplog.text
    assert "kv_memory_fraction" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 70000},
        {"max_body_mib": 0},
        {"drain_timeout_s": -1},
        {"replicas": 0},
        {"gateways": 65},
        {"replicas": 2, "device": "cuda:1"},
        {"standby_workers": 9},
        {"standby_workers": 1, "max_restarts": 0},
    ],
)
def test_wrong_serving_setting_is_rejected_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServeOptions(**settings)


def test_runtime_directory_too_deep_for_a_socket_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    runtime_dir = RuntimeDir()
    with pytest.raises(ConfigError, match="TMPDIR"):
        runtime_dir.endpoint("clients")
    runtime_dir.remove()


# Memory of a model's layers

WINDOWS = {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 40,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "hidden_activation": "gelu_pytorch_tanh",
}
STATES = {
    "architectures": ["Mamba2ForCausalLM"],
    "num_heads": 2,
    "head_dim": 16,
    "n_groups": 1,
    "state_size": 8,
    "max_position_embeddings": 4096,
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def test_a_request_may_be_as_long_as_all_groups_of_the_pool_hold(tmp_path: Path) -> None:
    """160 tokens: 10 blocks in the group without a window, one more in each of the two with one."""
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    for num_blocks, longest in ((33, 160), (34, 160), (35, 160), (36, 176), (1000, 512)):
        engine = plan(write(tmp_path, **WINDOWS), num_blocks=num_blocks, **settings)
        assert engine.identity.max_model_len == longest


def test_a_few_states_are_enough_for_a_request_of_any_length(tmp_path: Path) -> None:
    for settings in ({}, {"num_blocks": 4}):
        assert plan(write(tmp_path, **STATES), **settings).identity.max_model_len == 4096
    longer = plan(write(tmp_path, **STATES), num_blocks=4, max_model_len=100_000)
    assert longer.identity.max_model_len == 100_000


@pytest.mark.parametrize(
    ("changes", "settings", "block_size"),
    [({}, {}, 16), (STATES, {}, 16), (STATES, {"block_size": 32}, 32)],
    ids=["attention", "states", "as asked for"],
)
def test_blocks_are_as_large_as_the_model_likes_them_unless_asked_for(
    changes: dict[str, Any], settings: dict[str, int], block_size: int, tmp_path: Path
) -> None:
    engine = plan(write(tmp_path, **changes), **settings)
    assert engine.identity.block_size == engine.cache.block_size == block_size
    planned = plan_cache(CachePlanOptions(plan=str(tmp_path), **settings))
    assert [group.block_tokens for group in planned.cache.groups] == [block_size]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype='fp8_e4m3'.*StateSpec")],
)
def test_what_a_model_of_states_cannot_do_is_rejected_before_it_is_loaded(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(write(tmp_path, **STATES), max_model_len=100, **settings)


def test_blocks_too_few_are_counted_with_what_is_in_flight(tmp_path: Path) -> None:
    """Two groups with windows of 39 tokens before the newest one, and one group that keeps all 160
    tokens."""
    write(tmp_path, **WINDOWS)
    settings: dict[str, Any] = {"max_num_batched_tokens": 32, "max_model_len": 160}
    in_flight = {1: 6, 2: 8}  # blocks of 39 + 32 and 39 + 64 tokens, from any offset
    for num_steps, num_window_blocks in in_flight.items():
        settings["async_scheduling"] = num_steps == 2
        needed = 1 + 10 + 2 * num_window_blocks
        assert worker_config(plan(tmp_path, num_blocks=needed, **settings)).num_blocks == needed
        words = f"needs {needed},.*{32 * num_steps} tokens in {num_steps} steps.*max_num_batched"
        with pytest.raises(ConfigError, match=words):
            plan(tmp_path, num_blocks=needed - 1, **settings)
    fewer = plan(
        tmp_path, num_blocks=23, max_num_scheduled_tokens=16, **settings | {"max_model_len": 160}
    )
    assert (worker_config(fewer).max_num_scheduled_tokens, fewer.scheduler.token_budget) == (16, 16)
