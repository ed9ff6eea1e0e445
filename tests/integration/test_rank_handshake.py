"""A scheduler process with several workers: all are compared, all get every plan, one answers."""

from collections.abc import Iterator

import msgspec
import pytest

from longshore.protocol.handshake import EngineReady, Rejected, WorkerAccepted, WorkerReady
from longshore.protocol.kv_cache_spec import HeadShare
from longshore.protocol.outputs import ModelRunnerOutput, TransferReport, WorkerFailed
from longshore.protocol.transport.lifeline import (
    STOP_SIGNAL,
    Alive,
    Failed,
    Progress,
    Ready,
)
from tests.integration.engine_process import (
    IDENTITY,
    TIMEOUT_S,
    Client,
    EngineProcess,
    ScriptedWorker,
    running_engine,
)

SAMPLING_RANK = 1


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    with running_engine(num_workers=2) as process:
        yield process


def ready_client(engine: EngineProcess) -> Client:
    for rank in (1, 0):
        engine.say_hello(rank)
    for rank in (0, 1):
        assert engine.channels[rank].receive(TIMEOUT_S) == WorkerAccepted(1, 1000)
        engine.channels[rank].send(WorkerReady(rank))
    client, answer = engine.connect()
    assert isinstance(answer, EngineReady), answer
    return client


def reason_of_failure(engine: EngineProcess) -> str:
    while not isinstance(report := engine.next_report(), Failed):
        assert isinstance(report, Progress | Ready | Alive)
    assert engine.wait() == 1
    return report.reason


def test_nobody_is_welcome_before_all_have_come_and_the_smallest_cache_counts(
    engine: EngineProcess,
) -> None:
    assert engine.next_report() == Progress("waiting for 2 workers to load the model")
    engine.say_hello(1, num_blocks=700, groups=["c"])
    assert engine.channels[1].receive(0.3) is None
    engine.say_hello(0, num_blocks=900, groups=["ab"])
    for channel in engine.channels:
        assert channel.receive(TIMEOUT_S) == WorkerAccepted(epoch=1, num_blocks=700)
    assert engine.next_report() == Progress("waiting for 2 workers to warm up")
    for rank, channel in enumerate(engine.channels):
        channel.send(WorkerReady(rank))
    assert engine.next_report() == Ready(
        {"num_blocks": "700", "block_sizes": "16", "kv_cache_tokens": "11184"}
    )


def test_tokens_that_fit_are_those_of_whole_requests_in_all_groups(engine: EngineProcess) -> None:
    """A request of 2,048 tokens holds 128 of 999 blocks in each of the two groups."""
    for rank in (0, 1):
        engine.say_hello(rank, groups=[[f"{rank}.a"], [f"{rank}.b"]])
    for rank, channel in enumerate(engine.channels):
        assert isinstance(channel.receive(TIMEOUT_S), WorkerAccepted)
        channel.send(WorkerReady(rank))
    while isinstance(report := engine.next_report(), Progress):
        pass
    assert isinstance(report, Ready)
    assert report.details["kv_cache_tokens"] == str(999 * 2048 // 256)
    _, answer = engine.connect()
    assert isinstance(answer, EngineReady)
    assert (answer.num_blocks, answer.capacity.num_blocks) == (1000, 999)
    assert answer.capacity.blocks_of(2048) == 256
    assert answer.capacity.num_leasable_blocks == 0  # there is no connector


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ({"num_kv_heads": 2}, ("worker 1", "num_kv_heads=2", "num_kv_heads=1")),
        (
            {"identity": msgspec.structs.replace(IDENTITY, dtype="bfloat16")},
            ("worker 1", "bfloat16", "float32"),
        ),
        (
            {"identity": msgspec.structs.replace(IDENTITY, model_fingerprint="another")},
            ("worker 1", "model_fingerprint='another'"),
        ),
        (
            {"identity": msgspec.structs.replace(IDENTITY, hash_seed_digest="another")},
            ("worker 1", "hash_seed_digest='another'"),
        ),
        (
            {"identity": msgspec.structs.replace(IDENTITY, decode_context_parallel_size=2)},
            ("worker 1", "decode_context_parallel_size=2", "has 1"),
        ),
        (
            {"identity": msgspec.structs.replace(IDENTITY, cp_kv_cache_interleave_size=4)},
            ("worker 1", "cp_kv_cache_interleave_size=4", "has 1"),
        ),
        ({"dtype": "fp8_e4m3"}, ("worker 1", "dtype fp8_e4m3", "float32")),
        ({"block_size": 32}, ("worker 1", "block_size=32", "block_size=16")),
        ({"groups": [["a"], ["b"]]}, ("worker 1 has KV cache groups",)),
        ({"groups": [["layer 0"]]}, ("workers 0 and 1 both keep KV of layer 0",)),
        ({"groups": [["a", "a"]]}, ("both keep KV of a", "or one keeps it twice")),
        ({"says_rank": 0}, ("rank 0 connected to the endpoint of rank 1",)),
        (
            {"heads": HeadShare(0, 1, 2)},
            ("worker 1 has HeadShare(first=0, count=1, total=2)", "is HeadShare(", "total=1"),
        ),
    ],
    ids=[
        "shape",
        "identity",
        "model",
        "seed",
        "context ranks",
        "turns",
        "dtype",
        "block size",
        "groups",
        "a layer of another stage",
        "a layer twice",
        "rank",
        "heads",
    ],
)
def test_a_rank_that_does_not_fit_is_rejected_and_so_is_the_other(
    engine: EngineProcess, differs: dict[str, object], words: tuple[str, ...]
) -> None:
    engine.say_hello(0)
    engine.say_hello(1, **differs)  # type: ignore[arg-type]
    refusals = [channel.receive(TIMEOUT_S) for channel in engine.channels]
    assert isinstance(refusals[0], Rejected)
    assert refusals[0] == refusals[1]
    reason = reason_of_failure(engine)
    assert reason == refusals[0].reason
    assert all(word in reason for word in words)


@pytest.mark.parametrize("groups", [[["b", "a"]], [["a"]]], ids=["in another order", "fewer"])
def test_a_shard_with_other_layers_than_the_first_of_its_stage_is_rejected(
    groups: list[list[str]],
) -> None:
    with running_engine(num_workers=2, num_shards=2) as engine:
        engine.say_hello(0, groups=[["a", "b"]])
        engine.say_hello(1, groups=groups)
        reason = reason_of_failure(engine)
    assert "worker 1 has layers" in reason
    assert "worker 0 has [('a', 'b')]" in reason


def test_a_shard_with_the_heads_of_another_is_rejected() -> None:
    with running_engine(num_workers=2, num_shards=2) as engine:
        for rank in (0, 1):
            engine.say_hello(rank, groups=[["a"]], heads=HeadShare(0, 1, 2))
        reason = reason_of_failure(engine)
    assert "worker 1 has HeadShare(first=0, count=1, total=2)" in reason
    assert "shard 1 of 2 is HeadShare(first=1, count=1, total=2)" in reason


def test_a_rank_whose_blocks_have_other_heads_than_it_reports_is_rejected(
    engine: EngineProcess,
) -> None:
    for rank in (0, 1):
        engine.say_hello(rank, num_kv_heads=1, heads=HeadShare(0, 2, 2))
    reason = reason_of_failure(engine)
    assert "worker 0 has 2 KV heads, but its blocks of FullAttentionSpec have 1" in reason


def test_a_group_may_have_blocks_of_a_multiple_of_the_schedulers(engine: EngineProcess) -> None:
    for rank in (0, 1):
        engine.say_hello(rank, block_size=48)
    assert engine.channels[0].receive(TIMEOUT_S) == WorkerAccepted(epoch=1, num_blocks=1000)


def test_a_group_with_blocks_of_another_size_is_rejected(engine: EngineProcess) -> None:
    for rank in (0, 1):
        engine.say_hello(rank, block_size=24)
    assert isinstance(engine.channels[0].receive(TIMEOUT_S), Rejected)
    assert "blocks of 24 tokens, which is not a multiple of" in reason_of_failure(engine)


@pytest.mark.parametrize("came", [(), (0,), (0, 1)], ids=["alone", "loading", "warming up"])
def test_a_rank_that_cannot_start_ends_the_start_of_all(
    engine: EngineProcess, came: tuple[int, ...]
) -> None:
    for rank in came:
        engine.say_hello(rank)
    engine.channels[1].send(WorkerFailed(0, 1, "no memory left"))
    assert reason_of_failure(engine) == "worker 1 failed: no memory left"


def test_a_ready_rank_may_report_transfers_while_another_one_warms_up(
    engine: EngineProcess,
) -> None:
    for rank in (0, 1):
        engine.say_hello(rank)
    for channel in engine.channels:
        assert isinstance(channel.receive(TIMEOUT_S), WorkerAccepted)
    engine.channels[0].send(WorkerReady(0))
    engine.channels[0].send(TransferReport(1, 0, connector_metadata=b"what it found"))
    while isinstance(report := engine.next_report(), Progress) and "warm up" not in report.doing:
        pass
    engine.channels[1].send(WorkerReady(1))
    assert isinstance(engine.next_report(), Ready)
    assert isinstance(engine.connect()[1], EngineReady)


def test_every_rank_gets_every_plan_and_one_answers(engine: EngineProcess) -> None:
    client = ready_client(engine)
    workers = [ScriptedWorker(engine, rank=rank, answers=rank == SAMPLING_RANK) for rank in (0, 1)]
    client.add(1, prompt_len=40, max_tokens=5)
    client.add(2, prompt_len=7, max_tokens=3)
    client.receive_until(lambda: len(client.finished) == 2)
    assert client.tokens == {1: [40, 41, 42, 43, 44], 2: [7, 8, 9]}
    engine.process.send_signal(STOP_SIGNAL)
    assert engine.wait() == 0
    for worker in workers:
        worker.thread.join(TIMEOUT_S)
        assert worker.shutdown is not None
    seen = [[(plan.step, plan.digest) for plan in worker.plans] for worker in workers]
    assert len(seen[0]) >= 5
    assert seen[0] == seen[1]


def test_an_answer_of_a_rank_that_does_not_sample_ends_the_engine(engine: EngineProcess) -> None:
    ready_client(engine)
    engine.channels[0].send(ModelRunnerOutput(epoch=1, step=1))
    reason = reason_of_failure(engine)
    assert reason == "worker 0 sent an output of step 1, but only worker 1 samples"


def test_a_failure_of_any_rank_ends_the_engine_and_is_told_to_clients_and_ranks(
    engine: EngineProcess,
) -> None:
    client = ready_client(engine)
    sampling = ScriptedWorker(engine, rank=SAMPLING_RANK)
    engine.channels[0].send(WorkerFailed(1, 0, "the device caught fire"))
    failed = client.receive()
    assert getattr(failed, "reason", None) == "worker 0 failed: the device caught fire"
    sampling.thread.join(TIMEOUT_S)
    assert sampling.shutdown is not None
    assert reason_of_failure(engine) == "worker 0 failed: the device caught fire"
