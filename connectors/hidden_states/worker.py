"""The worker half: keeps hidden states in host memory until their request ends, then writes."""

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from longshore.connectors.base import (
    KVCaches,
    StepTokens,
    TransferQueue,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.hidden_states.scheduler import Begin, Commands, Save, settings_of
from longshore.connectors.options import make_folder

logger = logging.getLogger(__name__)


class HiddenStates:
    """Hidden states of the first tokens of one request, in pieces as steps computed them."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._pieces: list[tuple[int, Tensor]] = []  # (first position, states on the host)

    def add(self, position: int, states: Tensor) -> None:
        """Copy the states of the tokens from `position` on. On CUDA, the copy has ended when the
        step has."""
        if position == 0:  # the request begins, or was preempted and begins again
            self._pieces.clear()
        num_kept = min(len(states), self._num_tokens - position)
        if num_kept > 0:
            try:
                piece = torch.empty(
                    (num_kept, states.shape[1]), dtype=states.dtype, pin_memory=states.is_cuda
                )
            except (RuntimeError, MemoryError) as error:
                logger.error("hidden states of %d tokens are lost: no memory: %s", num_kept, error)
                return
            piece.copy_(states[:num_kept], non_blocking=True)
            self._pieces.append((position, piece))

    @property
    def is_empty(self) -> bool:
        return not self._pieces

    def first(self, num_tokens: int) -> Tensor | None:
        """(num_tokens, hidden_size); None if some of them were never computed."""
        end, states = 0, None
        for position, piece in list(self._pieces):
            if states is None:
                states = piece.new_empty((num_tokens, piece.shape[1]))
            if position > end:
                return None
            count = min(len(piece), num_tokens - position)
            if count > 0:
                states[position : position + count] = piece[:count]
            end = max(end, position + len(piece))  # a step that is computed again replaces a piece
        return states if end >= num_tokens else None


class HiddenStatesWorker(WorkerConnector[Commands]):
    """Only the rank that samples gets hidden states, so only it writes files. A file appears under
    its name when it is complete."""

    contract_version: ClassVar[int] = 2
    stores_within_step = False
    has_hidden_states_hook = True

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self._folder = settings_of(config).path
        self._states: dict[str, HiddenStates] = {}  # changed on the loop thread only
        self._is_reported = False
        self._queue: TransferQueue

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        make_folder("hidden_states", self._folder)
        self._queue = queues.open("hidden-states", on_host=True)
        queues.wake()

    def bind_connector_metadata(self, data: bytes) -> Commands:
        return msgspec.msgpack.decode(data, type=Commands)

    def start_load_kv(self, metadata: Commands) -> None:
        for save in metadata.saves:
            states = self._states.pop(save.request_id)
            if not states.is_empty:  # else another rank samples
                self._queue.submit(partial(_save, save, states))
        for request_id in metadata.discarded:
            self._states.pop(request_id, None)
        self._states |= map(_begin, metadata.begun)

    def save_hidden_states(
        self, metadata: Commands, tokens: StepTokens, hidden_states: Tensor
    ) -> None:
        first = 0
        for request_id, num_tokens, position in zip(
            tokens.request_ids, tokens.num_tokens, tokens.positions, strict=True
        ):
            states = self._states.get(request_id)
            if states is not None:
                states.add(position, hidden_states[first : first + num_tokens])
            first += num_tokens

    def build_connector_worker_meta(self) -> bytes:
        if self._is_reported:
            return b""
        self._is_reported = True
        return msgspec.msgpack.encode(self.config.hidden_size)


def _begin(begin: Begin) -> tuple[str, HiddenStates]:
    return begin.request_id, HiddenStates(begin.num_tokens)


def _save(save: Save, states: HiddenStates) -> None:
    token_ids = torch.from_numpy(np.frombuffer(save.token_ids, "<i4").astype(np.int64))
    rows = states.first(len(token_ids))
    if rows is None:
        logger.error(
            "not all hidden states of request %s were computed; %s is not written",
            save.request_id,
            save.file,
        )
        return
    try:
        _write(Path(save.file), {"hidden_states": rows, "token_ids": token_ids})
    except OSError as error:
        logger.error("hidden states of request %s are lost: %s", save.request_id, error)


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    draft = path.with_name(f".{path.name[:100]}.{os.getpid()}")
    try:
        save_file(dict(tensors), draft)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
