"""What the scheduler learns of its ranks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import msgspec
import zmq

from longshore.protocol.handshake import (
    EngineIdentity,
    Feature,
    FromWorker,
    ToWorker,
    WorkerAccepted,
    WorkerHello,
    WorkerReady,
)
from longshore.protocol.kv_cache_spec import (
    FullAttentionSpec,
    HeadShare,
    KVCacheConfig,
    KVCacheGroup,
    StateSpec,
)
from longshore.protocol.outputs import TransferReport
from longshore.protocol.transport.channel import Channel, Endpoint
from longshore.scheduler.config import CacheConfig, SchedulerConfig, SchedulerProcessConfig
from longshore.scheduler.process.worker_handshake import accept_workers

IDENTITY = EngineIdentity(
    model_fingerprint="m",
    dtype="float32",
    block_size=16,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    hash_seed_digest="",
)


class LateChannel(Channel[ToWorker, FromWorker]):
    """Its second message seems to arrive late."""

    num_received = 0

    def receive(self, timeout_s: float | None = 0.0) -> FromWorker | None:
        self.num_received += 1
        return None if self.num_received == 2 else super().receive(timeout_s)


CONFIG = SchedulerProcessConfig(
    scheduler=SchedulerConfig(max_model_len=64, max_num_batched_tokens=64),
    cache=CacheConfig(),
    identity=IDENTITY,
    workers=(Endpoint("ipc://w0"), Endpoint("ipc://w1")),
    sampling_rank=1,
    clients=Endpoint("ipc://c"),
    hash_seed="00",
    vocab_size=8,
    rank_timeout_s=60.0,
)
ATTENTION = FullAttentionSpec(16, num_kv_heads=1, head_size=4, dtype_bytes=4)


def hello(rank: int) -> WorkerHello:
    cache = KVCacheConfig(100, (KVCacheGroup((f"{rank}.a",), ATTENTION),), "float32")
    return WorkerHello(rank, IDENTITY, cache, HeadShare(0, 1, 1))


def test_what_a_ready_rank_reports_waits_until_all_are_ready() -> None:
    report = TransferReport(1, 0, connector_metadata=b"started")
    messages = (hello, WorkerReady, lambda rank: report)
    with workers_that_send(*messages, last_kind=LateChannel) as workers:
        accept_workers(workers, CONFIG)
        assert [worker.receive() for worker in workers] == [report, report]


def test_what_a_rank_sent_to_a_scheduler_that_has_died_is_dropped() -> None:
    late, report = TransferReport(1, 0), TransferReport(2, 0)
    with workers_that_send(lambda rank: late, hello, WorkerReady, lambda rank: report) as workers:
        accept_workers(workers, msgspec.structs.replace(CONFIG, epoch=2))
        assert [worker.receive() for worker in workers] == [report, report]


@contextmanager
def workers_that_send(
    *messages: Callable[[int], FromWorker],
    last_kind: type[Channel[ToWorker, FromWorker]] = Channel,
) -> Iterator[list[Channel[ToWorker, FromWorker]]]:
    """Channels to two ranks, which have sent these messages."""
    workers: list[Channel[ToWorker, FromWorker]] = []
    with zmq.Context() as context, ExitStack() as open_channels:
        for rank, kind in enumerate((Channel, last_kind)):
            ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
            ours.bind(f"inproc://{rank}")
            theirs.connect(f"inproc://{rank}")
            worker: Channel[ToWorker, FromWorker] = kind(ours, FromWorker)
            end: Channel[FromWorker, ToWorker] = Channel(theirs, ToWorker)
            open_channels.enter_context(closing(worker))
            open_channels.enter_context(closing(end))
            workers.append(worker)
            for message in messages:
                end.send(message(rank))
        yield workers


def test_ranks_with_their_own_layers_and_kv_heads_are_accepted() -> None:
    """Two stages of four shards. The model has two KV heads, so two shards of a stage hold each."""
    config = msgspec.structs.replace(
        CONFIG,
        workers=tuple(Endpoint(f"ipc://w{rank}") for rank in range(8)),
        sampling_rank=4,
    )
    state = StateSpec(block_size=16, shapes=((2, 3),), dtype_bytes=(4,))
    layers = [((f"{stage}.a", f"{stage}.b"), (f"{stage}.c",)) for stage in (0, 1)]
    groups = [(KVCacheGroup(kv, ATTENTION), KVCacheGroup(states, state)) for kv, states in layers]
    ends = []
    with zmq.Context() as context, ExitStack() as open_channels:
        workers: list[Channel[ToWorker, FromWorker]] = []
        for rank in range(8):
            ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
            ours.bind(f"inproc://{rank}")
            theirs.connect(f"inproc://{rank}")
            worker: Channel[ToWorker, FromWorker] = Channel(ours, FromWorker)
            end: Channel[FromWorker, ToWorker] = Channel(theirs, ToWorker)
            open_channels.enter_context(closing(worker))
            open_channels.enter_context(closing(end))
            workers.append(worker)
            cache = KVCacheConfig(100 + rank, groups[rank // 4], "float32")
            heads = HeadShare(rank % 4 // 2, 1, 2)
            end.send(WorkerHello(rank, IDENTITY, cache, heads, (Feature.POOLING,)))
            end.send(WorkerReady(rank))
            ends.append(end)
        accepted = accept_workers(workers, config)
        assert [end.receive() for end in ends] == [WorkerAccepted(1, 100)] * 8
    assert accepted.rank_block_bytes == (2 * ATTENTION.page_size_bytes,) * 8
    assert accepted.kv_cache == KVCacheConfig(100, groups[0], "float32")
    assert accepted.features == {Feature.POOLING}
