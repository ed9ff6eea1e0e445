"""Calls the hooks of the connector's worker half, and reports what it has transferred.

`WorkerConnector` in `connectors/base.py` says when each hook is called, and on which thread.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from longshore.connectors.base import (
    EncoderWorker,
    GroupBlocks,
    KVCaches,
    StepTokens,
    WorkerConnector,
)
from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.outputs import TransferReport
from longshore.protocol.plan import SchedulerOutput
from longshore.worker.kv_cache.buffer import KVCache, PagedBytes, PagedKV, PagedLatents
from longshore.worker.kv_cache.state_pages import StatePages
from longshore.worker.queues.transfer_queues import WorkerQueues

logger = logging.getLogger(__name__)

Int64s: TypeAlias = npt.NDArray[np.int64]
LayerBlocks: TypeAlias = Tensor | tuple[Tensor, ...]


class HookFailed(LongshoreError):
    """A hook of the worker half raised, so blocks may hold anything. The worker must stop."""


class ConnectorRunner:
    """The connector of one rank. All calls are on the worker's loop thread.

    num_rows: rows of the engine (max_num_seqs).
    """

    def __init__(
        self,
        connector: WorkerConnector[Any],
        queues: WorkerQueues,
        *,
        num_rows: int,
        epoch: int,
        rank: int,
    ) -> None:
        self.connector = connector
        self._queues = queues
        self._epoch = epoch
        self._rank = rank
        self._request_ids = [""] * num_rows
        self._finished: list[str] = []
        self._layers: dict[str, LayerBlocks] = {}
        self._end_transfers = EndTransfers(connector)

    @property
    def has_layer_hooks(self) -> bool:
        return self.connector.has_layer_hooks

    @property
    def may_repeat_steps(self) -> bool:
        """Whether a step that was not computed has no effect on what the connector stores and
        loads."""
        return not (self.connector.has_layer_hooks or self.connector.stores_within_step)

    @property
    def poll_interval_s(self) -> float | None:
        return self.connector.poll_interval_s

    def register(self, cache: KVCache) -> None:
        """Give the connector the blocks of all groups. Raises what the connector raises if that is
        a LongshoreError, such as an invalid option, else HookFailed."""
        caches = KVCaches(
            tuple(_group_blocks(cache, group) for group in range(len(cache.groups))), cache.device
        )
        self._layers = {
            name: layer for group in caches.groups for name, layer in group.layers.items()
        }
        try:
            self.connector.register_kv_caches(caches, self._queues)
        except LongshoreError:
            raise
        except Exception as error:
            raise HookFailed(
                f"register_kv_caches of the connector {type(self.connector).__name__} raised "
                f"{type(error).__name__}: {error}. The worker cannot start with it. Correct "
                "--kv-connector-config, or the connector."
            ) from error

    def begin_step(
        self, plan: SchedulerOutput, rows: Int64s, starts: Int64s, counts: Int64s
    ) -> "StepTransfers | None":
        """Begin the loads and stores of a plan that has been applied, before its step is
        submitted. Returns None, and calls no hook, if the plan has no metadata. Raises HookFailed.

        rows, starts, counts: (num_seqs,) row of each sequence of the step, its tokens computed
        before the step, and its tokens in the step."""
        connector, ids = self.connector, self._request_ids
        self._finished += [ids[row] for row in plan.finished_rows.tolist()]
        for start in plan.added:
            ids[start.row] = start.request_id
        if not plan.connector_metadata:
            return None
        with named(connector, "bind_connector_metadata"):
            metadata = connector.bind_connector_metadata(plan.connector_metadata)
        if len(plan.preempted_rows):
            with named(connector, "handle_preemptions"):
                connector.handle_preemptions(metadata)
        with named(connector, "start_load_kv"):
            connector.start_load_kv(metadata)
        tokens = None
        if connector.has_hidden_states_hook:
            tokens = StepTokens(
                [ids[row] for row in rows.tolist()], counts.tolist(), starts.tolist()
            )
        return StepTransfers(connector, metadata, self._layers, tokens)

    def take_report(self) -> TransferReport | None:
        """What has ended since the last call; None if nothing has. Raises HookFailed."""
        finished, self._finished = self._finished, []
        with named(self.connector, "get_finished"):
            ended = self.connector.get_finished(finished)
        with named(self.connector, "build_connector_worker_meta"):
            metadata = self.connector.build_connector_worker_meta()
        with named(self.connector, "get_kv_connector_stats"):
            operations = self.connector.get_kv_connector_stats()
        if not (ended.sent or ended.received or metadata or operations):
            return None
        return TransferReport(
            self._epoch,
            self._rank,
            finished_sending=tuple(ended.sent),
            finished_receiving=tuple(ended.received),
            failed_block_ids=int32_array(ended.failed_block_ids),
            connector_metadata=metadata,
            operations=tuple(operations),
        )

    def close(self) -> None:
        """End all transfers. No other call may follow. Raises HookFailed if the connector could
        not, then and at every later call."""
        try:
            self._end_transfers()
        finally:
            self._queues.close()


class EndTransfers:
    """Calls `shutdown` of a connector. If that raises, this raises HookFailed, and again at every
    later call: only the end of the process ends the transfers then."""

    def __init__(self, connector: WorkerConnector[Any] | EncoderWorker[Any]) -> None:
        self._connector = connector
        self._failure: HookFailed | None = None

    def __call__(self) -> None:
        if self._failure is not None:
            raise self._failure
        name = type(self._connector).__name__
        try:
            self._connector.shutdown()
        except Exception as error:
            logger.exception("shutdown of the connector %s raised", name)
            self._failure = HookFailed(
                f"shutdown of the connector {name} raised {type(error).__name__}: {error}. Its "
                "transfers may still write to memory until this process has ended."
            )
            raise self._failure from error


@dataclass(frozen=True)
class StepTransfers:
    """The hooks of one step. They run on the compute queue, except for `failed_block_ids`, which is
    called when the step has ended.

    layers: the blocks of every layer, by name.
    tokens: the step's tokens, for a connector that has the hook for hidden states.
    """

    connector: WorkerConnector[Any]
    metadata: Any
    layers: Mapping[str, LayerBlocks]
    tokens: StepTokens | None

    @property
    def has_layer_hooks(self) -> bool:
        return self.connector.has_layer_hooks

    def before_step(self) -> None:
        with named(self.connector, "wait_for_load"):
            self.connector.wait_for_load(self.metadata)

    def before_layer(self, name: str) -> None:
        with named(self.connector, "wait_for_layer_load"):
            self.connector.wait_for_layer_load(self.metadata, name)

    def after_layer(self, name: str) -> None:
        with named(self.connector, "save_kv_layer"):
            self.connector.save_kv_layer(self.metadata, name, self.layers[name])

    def after_layers(self, hidden: Tensor) -> None:
        if self.tokens is not None:
            with named(self.connector, "save_hidden_states"):
                self.connector.save_hidden_states(self.metadata, self.tokens, hidden)

    def after_step(self) -> None:
        with named(self.connector, "wait_for_save"):
            self.connector.wait_for_save(self.metadata)

    def failed_block_ids(self) -> Int32Array:
        """Blocks that the synchronous loads of the step did not fill."""
        with named(self.connector, "get_block_ids_with_load_errors"):
            failed = self.connector.get_block_ids_with_load_errors(self.metadata)
        return int32_array(np.unique(np.asarray(failed, np.int32)))


@contextmanager
def named(connector: object, hook: str) -> Iterator[None]:
    """Raise HookFailed if the block raises."""
    try:
        yield
    except Exception as error:
        raise HookFailed(
            f"{hook} of the connector {type(connector).__name__} raised "
            f"{type(error).__name__}: {error}. The worker stops, because blocks may hold anything. "
            "A transfer that fails must be reported instead."
        ) from error


def _group_blocks(cache: KVCache, group: int) -> GroupBlocks:
    planned = cache.groups[group]
    layers: dict[str, LayerBlocks] = {}
    if planned.layer_names:
        layer = _layer_blocks(cache, group)
        layers = {name: layer(index) for index, name in enumerate(planned.layer_names)}
    blocks = cache.buffer[:, : planned.block_size_bytes]
    return GroupBlocks(planned.spec, planned.layer_names, blocks, layers)


def _layer_blocks(cache: KVCache, group: int) -> Callable[[int], LayerBlocks]:
    """The blocks of one layer of a group, by its index in the group."""
    match cache.view(group):
        case PagedKV(planes=planes):
            return lambda layer: planes[:, :, layer]
        case PagedLatents(latents=latents):
            return lambda layer: latents[:, layer]
        case StatePages():
            return lambda layer: ()  # in units, which are scattered over the pages
        case PagedBytes(pages=pages):
            return lambda layer: pages[:, layer]
