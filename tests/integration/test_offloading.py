"""Offloading through real processes: host memory that ranks share, and a disk that survives."""

import json
import os
import random
import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longshore import LLM, SamplingParams
from longshore.connectors.offloading.disk.catalog import stores
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.models import make_tiny_llama

NUM_TOKENS = 12
LONG = "The harbour has ships, and every ship has a name. " * 12
BLOCK_SIZE = 16

Start = Callable[..., Deployment]


@pytest.fixture
def start(
    tiny_model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Starts a deployment after the one before has ended, with a directory of its own, whose path
    is short enough for sockets."""
    with ExitStack() as stack:

        def make(*flags: str, **settings: Any) -> Deployment:
            own = tmp_path_factory.mktemp("own")
            deployment = Deployment(tiny_model[0], own, *flags, **settings)
            return stack.enter_context(deployment).wait_until_ready()

        yield make


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def flags(tmp_path: Path, disk: Path) -> list[str]:
    """Of a deployment with host memory and disk, which keeps its seed."""
    settings = {"cpu_bytes_to_use": "8MiB", "disk_path": str(disk), "disk_bytes": "32MiB"}
    return [
        *("--kv-connector", "offloading", "--kv-connector-config", json.dumps(settings)),
        *("--min-load-wait-s", "60"),  # a late read is a miss
        *("--state-dir", str(tmp_path / "state")),
    ]


def ask(deployment: Deployment, prompt: str, max_tokens: int = NUM_TOKENS) -> tuple[str, int]:
    """The answer, and the number of cached prompt tokens."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{deployment.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        answer = json.load(response)
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0)


def metric(deployment: Deployment, name: str) -> float:
    """The sum of the series that begin with `longshore_NAME`, which may include labels other than
    `model_name`, which all have."""
    with urllib.request.urlopen(f"{deployment.url}/metrics", timeout=PATIENCE_S) as response:
        text = re.sub(r'model_name="[^"]*",?', "", response.read().decode())
    values = re.findall(rf"^longshore_{re.escape(name)}\S* (\S+)$", text, re.M)
    return sum(map(float, values))


def num_hit_tokens(deployment: Deployment) -> int:
    """Tokens that were loaded by the connector."""
    return int(metric(deployment, "scheduler_external_hit_tokens_total"))


def num_entries(disk: Path) -> int:
    """Blocks on disk that all ranks of some store have."""
    if not disk.exists():
        return 0
    return sum(min(rank.num_entries for rank in store.ranks) for store in stores(disk))


def stop(deployment: Deployment) -> None:
    assert deployment.stop() == 0, deployment.output
    deployment.assert_nothing_is_left()


@pytest.mark.slow
def test_a_restarted_server_answers_a_long_prompt_from_disk(
    start: Start, flags: list[str], disk: Path
) -> None:
    first = start(*flags)
    answer, num_cached = ask(first, LONG)
    assert num_cached == num_hit_tokens(first) == 0
    num_full = len(LONG) // BLOCK_SIZE  # one token per byte
    wait_until(lambda: num_entries(disk) >= num_full)
    stop(first)

    second = start(*flags)
    again, num_cached = ask(second, LONG)
    assert again == answer
    assert num_cached >= (num_full - 1) * BLOCK_SIZE
    wait_until(lambda: num_hit_tokens(second) >= (num_full - 1) * BLOCK_SIZE)
    hits = 'kv_tier_hit_tokens_total{engine="0",medium="DISK"}'
    assert metric(second, hits) == num_hit_tokens(second)
    stop(second)


@pytest.mark.slow
def test_new_workers_load_from_host_memory_what_the_former_ones_have_stored(start: Start) -> None:
    """Its ledger is the scheduler's, which outlives them."""
    options = '{"cpu_bytes_to_use": "64MiB"}'
    flags = ["--no-kv-adoption"]  # else they have it already
    server = start("--kv-connector", "offloading", "--kv-connector-config", options, *flags)
    answer, _ = ask(server, LONG)
    num_full = len(LONG) // BLOCK_SIZE
    stored = 'kv_tier_blocks{engine="0",medium="CPU"}'
    wait_until(lambda: metric(server, stored) >= num_full)
    server.members["worker-0"].kill()
    wait_until(lambda: "engine-0 is ready again" in server.output)
    again, num_cached = ask(server, LONG)
    assert again == answer
    assert num_cached >= (num_full - 1) * BLOCK_SIZE
    wait_until(lambda: num_hit_tokens(server) >= (num_full - 1) * BLOCK_SIZE)
    server.find_members()
    stop(server)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["scheduler", "worker-0"])
def test_an_engine_whose_process_was_killed_finds_its_blocks_on_disk(
    start: Start, flags: list[str], disk: Path, victim: str
) -> None:
    """Host memory is the same. Its ledger is lost with the scheduler."""
    server = start(*flags)
    answer, _ = ask(server, LONG)
    num_full = len(LONG) // BLOCK_SIZE
    wait_until(lambda: num_entries(disk) >= num_full)
    server.members[victim].kill()
    wait_until(lambda: "engine-0 is ready again" in server.output)
    again, num_cached = ask(server, LONG)
    assert again == answer
    assert num_cached >= (num_full - 1) * BLOCK_SIZE
    server.find_members()
    stop(server)


@pytest.mark.req("MET-04", "WRK-07")
def test_the_metrics_show_what_moves_between_the_tiers(
    start: Start, flags: list[str], disk: Path
) -> None:
    """A pool of 60 blocks holds one of the two prompts, which are loaded again in turn."""
    server = start(*flags, num_blocks=60)
    prompts = LONG, LONG[::-1]
    for prompt in prompts:
        ask(server, prompt)
    num_full = len(LONG) // BLOCK_SIZE
    wait_until(lambda: metric(server, 'kv_tier_blocks{engine="0",medium="DISK"}') >= 2 * num_full)

    def moved(what: str, transfer_type: str) -> float:
        labels = f'{{engine="0",transfer_type="{transfer_type}"}}'
        return metric(server, f"kv_offload_{what}_total{labels}")

    stored_bytes = moved("bytes", "GPU_to_CPU")
    block_bytes = stored_bytes / moved("blocks", "GPU_to_CPU")
    assert stored_bytes >= 2 * num_full * block_bytes > 0
    assert moved("bytes", "CPU_to_DISK") == moved("blocks", "CPU_to_DISK") * block_bytes
    assert moved("blocks", "CPU_to_DISK") == metric(server, 'kv_tier_blocks{engine="0",medium="D')

    ask(server, prompts[0])
    wait_until(lambda: moved("bytes", "CPU_to_GPU") > 0)
    loaded = moved("blocks", "CPU_to_GPU")
    assert loaded >= num_full // 3, "the rest is in the prefix cache"
    assert moved("bytes", "CPU_to_GPU") == loaded * block_bytes
    hits = metric(server, 'kv_tier_hit_tokens_total{engine="0",medium="CPU"}')
    assert hits == num_hit_tokens(server) == loaded * BLOCK_SIZE
    for transfer_type in ("GPU_to_CPU", "CPU_to_GPU", "CPU_to_DISK"):
        assert 0 < moved("seconds", transfer_type) < PATIENCE_S
        assert moved("failed_blocks", transfer_type) == 0
        assert moved("corrupt_blocks", transfer_type) == 0
    wait_until(lambda: metric(server, "kv_offload_queued_blocks") == 0)
    stop(server)


@pytest.mark.slow
def test_what_was_stored_under_another_seed_is_ignored_by_name(
    start: Start, flags: list[str], disk: Path, tmp_path: Path
) -> None:
    first = start(*flags)
    answer, _ = ask(first, LONG)
    wait_until(lambda: num_entries(disk) > 10)
    stop(first)

    flags[-1] = str(tmp_path / "another state")
    second = start(*flags)
    assert ask(second, LONG) == (answer, 0)
    assert re.search(r"disk tier .*: ignored \S+ GiB of .*hash seed", second.output)
    stop(second)


@pytest.mark.slow
def test_a_flipped_byte_on_disk_is_a_miss_with_a_warning(
    start: Start, flags: list[str], disk: Path
) -> None:
    first = start(*flags)
    answer, _ = ask(first, LONG)
    num_full = len(LONG) // BLOCK_SIZE
    wait_until(lambda: num_entries(disk) >= num_full)
    stop(first)
    for segment in disk.glob("*/rank-*/segment-*"):
        content = bytearray(segment.read_bytes())
        for start_of_slot in range(0, len(content), 4096):
            content[start_of_slot + 7] ^= 16
        segment.write_bytes(content)

    second = start(*flags)
    assert ask(second, LONG)[0] == answer
    assert "does not match its checksum" in second.output
    corrupt = 'kv_offload_corrupt_blocks_total{engine="0",transfer_type="DISK_to_CPU"}'
    wait_until(lambda: metric(second, corrupt) > 0)
    assert metric(second, "scheduler_failed_loads_total") == 1
    assert ask(second, LONG)[0] == answer
    stop(second)


def flip_host_memory(deployment: Deployment) -> None:
    """Flip a bit in every KiB of the host tier, through the supervisor's descriptor."""
    for descriptor in Path(f"/proc/{deployment.process.pid}/fd").iterdir():
        if "memfd:longshore-engine" in os.readlink(descriptor):
            with descriptor.open("r+b") as memory:
                content = np.frombuffer(memory.read(), np.uint8).copy()
                content[::1024] ^= 4
                memory.seek(0)
                memory.write(content.tobytes())
            return
    raise AssertionError("the supervisor has no shared memory")


@pytest.mark.slow
@pytest.mark.parametrize("has_disk", [False, True])
def test_flipped_bits_in_host_memory_are_misses_with_a_warning(
    start: Start, flags: list[str], has_disk: bool
) -> None:
    """Every block is verified, so none of the wrong ones is used; what was written to disk before
    is right."""
    if not has_disk:
        flags[3] = json.dumps({"cpu_bytes_to_use": "8MiB"})
    server = start(*flags, "--verify-kv", "always", num_blocks=60)
    prompts = LONG, LONG[::-1]
    answers = [ask(server, prompt)[0] for prompt in prompts]
    num_full = len(LONG) // BLOCK_SIZE
    tier = "DISK" if has_disk else "CPU"
    stored = f'kv_tier_blocks{{engine="0",medium="{tier}"}}'
    wait_until(lambda: metric(server, stored) >= 2 * num_full)
    flip_host_memory(server)

    assert ask(server, prompts[0])[0] == answers[0]
    corrupt = 'kv_offload_corrupt_blocks_total{engine="0",transfer_type="CPU_to_GPU"}'
    wait_until(lambda: metric(server, corrupt) > 0)
    assert metric(server, "scheduler_failed_loads_total") >= 1
    assert "of host memory is damaged; it counts as a miss" in server.output
    assert [ask(server, prompt)[0] for prompt in prompts] == answers
    stop(server)


@pytest.mark.slow
@pytest.mark.req("WRK-02", "LDS-07")
@pytest.mark.parametrize("layout", ["tensor", pytest.param("pipeline", marks=pytest.mark.long)])
def test_ranks_share_one_region_of_host_memory(tmp_path: Path, layout: str) -> None:
    make_tiny_llama(tmp_path, num_hidden_layers=3)
    chance = random.Random(1)
    prompts = [[chance.randrange(3, 128) for _ in range(length)] for length in (150, 120, 140)]
    asked = [{"prompt_token_ids": prompt} for prompt in [*prompts, prompts[0], *prompts]]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "max_model_len": 200,
        "num_blocks": 16,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
    }

    def tokens(**more: Any) -> tuple[list[list[int]], int]:
        with LLM(tmp_path, **settings, **more) as llm:
            outputs = [llm.generate([each], greedy, use_tqdm=False)[0] for each in asked]
            return [list(output.outputs[0].token_ids) for output in outputs], sum(
                output.num_cached_tokens or 0 for output in outputs
            )

    expected, num_found = tokens()
    options = {"cpu_bytes_to_use": "8MiB", "verify_kv": "always"}
    loaded, num_cached = tokens(
        kv_connector="offloading",
        kv_connector_config=json.dumps(options),
        **{f"{layout}_parallel_size": 2},
    )
    assert loaded == expected
    assert num_cached > num_found + 100, "prompts came from host memory"


@pytest.mark.slow
@pytest.mark.req("TIE-04", "ERR-10")
@pytest.mark.parametrize("tensor_parallel_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_server_swaps_requests_and_answers_as_without_pressure(
    start: Start, tensor_parallel_size: int
) -> None:
    """Eight long answers at once in a pool of 60 blocks."""
    flags = ["--tensor-parallel-size", str(tensor_parallel_size)]
    prompts = [LONG[shift : shift + 60 + 7 * shift] for shift in range(8)]

    def answers(server: Deployment) -> list[str]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(lambda prompt: ask(server, prompt, 90)[0], prompts))
        return found

    calm = start(*flags, num_blocks=600)
    expected = answers(calm)
    assert metric(calm, "scheduler_preemptions_total") == 0
    stop(calm)
    connector = json.dumps({"cpu_bytes_to_use": "8MiB", "verify_kv": "always"})
    swapping = start(
        *flags,
        *("--kv-connector", "offloading", "--kv-connector-config", connector),
        *("--preemption-mode", "swap", "--preempt-threshold", "0.7", "--admit-threshold", "0.7"),
        num_blocks=60,
    )
    assert answers(swapping) == expected
    wait_until(lambda: metric(swapping, "scheduler_swapped_in_requests_total") > 0)
    num_out = metric(swapping, "scheduler_swapped_out_requests_total")
    assert metric(swapping, "scheduler_preemptions_total") >= num_out > 0
    assert metric(swapping, "scheduler_swapped_out_blocks_total") > num_out
    stop(swapping)


def test_a_prompt_with_no_store_is_in_no_tier_and_one_with_a_hint_is(
    tiny_model: tuple[Path, Any], disk: Path
) -> None:
    """The disk gets blocks in the order in which they were computed, so when it has those of the
    second prompt, those of the first would be there."""
    options = {"cpu_bytes_to_use": "8MiB", "disk_path": str(disk), "disk_bytes": "32MiB"}
    settings: dict[str, Any] = {
        "num_blocks": 200,
        "threads": 1,
        "kv_connector": "offloading",
        "kv_connector_config": json.dumps(options),
    }
    params = SamplingParams(temperature=0, max_tokens=1)
    num_full = len(LONG) // BLOCK_SIZE
    with LLM(tiny_model[0], **settings) as llm:

        def ask(**prompt: Any) -> int:
            (output,) = llm.generate({"prompt": LONG, **prompt}, params, use_tqdm=False)
            return output.num_cached_tokens or 0

        assert ask(no_store=True) == 0
        assert ask(no_store=True) == 0
        assert ask(kv_cache_retention={"ttl_s": 60}) == 0
        assert ask() >= (num_full - 1) * BLOCK_SIZE
        wait_until(lambda: num_entries(disk) >= num_full)
    assert num_entries(disk) == num_full
