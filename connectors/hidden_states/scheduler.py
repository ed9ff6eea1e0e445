"""The scheduler half: which requests are saved, under which name, and how many tokens of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import quote

import msgspec

from longshore.connectors.base import (
    AskLater,
    ConnectorConfig,
    ConnectorOutput,
    FinishAction,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
)
from longshore.connectors.options import Options
from longshore.protocol.arrays import Int32Array

MAX_NAME_BYTES: Final = 200
"""Limit for a file's name without its suffix; file systems allow 255 bytes."""


@dataclass(frozen=True, slots=True)
class HiddenStatesSettings:
    """path:       folder of the files.
    saves_all:  all requests are saved, whether they ask for it or not.
    max_tokens: requests with more tokens to save are not saved. Limits memory and files."""

    path: Path
    saves_all: bool
    max_tokens: int


def settings_of(config: ConnectorConfig) -> HiddenStatesSettings:
    """Raises ConfigError for invalid options."""
    options = Options("hidden_states", config.options, ("path", "requests", "max_tokens"))
    return HiddenStatesSettings(
        Path(options.text("path", "/var/tmp/states")).absolute(),
        options.choice("requests", ("asking", "all")) == "all",
        options.integer("max_tokens", 8192, minimum=1),
    )


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """Keep the states of the first `num_tokens` tokens of a request."""

    request_id: str
    num_tokens: int


class Save(msgspec.Struct, frozen=True, array_like=True):
    """Write the states of these tokens, (n,) int32, to the file."""

    request_id: str
    file: str
    token_ids: bytes


class Commands(msgspec.Struct, frozen=True):
    """Metadata of a plan. discarded: requests that are not saved after all."""

    begun: list[Begin] = []
    saves: list[Save] = []
    discarded: list[str] = []


@dataclass(slots=True)
class _Saved:
    """A request that asked. error: why it is not saved."""

    file: str
    num_prompt_tokens: int
    has_output: bool
    error: str | None = None


class HiddenStatesConnector(SchedulerConnector):
    """Saves the prompt of a request when it ends, and with `include_output_tokens` its output
    without the last token, which the model has not processed.

    Every token of such a request is computed: cached blocks have no hidden states. A request that
    ends without an output token is not saved.
    """

    contract_version: ClassVar[int] = 2
    supports_hma = True
    chunk_blocks = 0
    needs_every_step = True  # the worker saves the states of a step only if its plan has metadata
    opens_nothing: ClassVar[bool] = True
    worker_half: ClassVar[str] = "longshore.connectors.hidden_states.worker:HiddenStatesWorker"

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        settings_of(ConnectorConfig(options))

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self._settings = settings_of(config)
        self._hidden_size: int | None = None  # until a worker has reported it
        self._saved: dict[str, _Saved] = {}
        self._begun: list[Begin] = []
        self._saves: list[Save] = []
        self._discarded: list[str] = []

    def on_new_request(self, request: RequestView) -> None:
        params = request.kv_transfer_params or {}
        asked = params.get("save_hidden_states", self._settings.saves_all)
        if asked is False:
            return
        name = request.request_id if asked is True else asked
        saved = _Saved("", request.num_prompt_tokens, bool(params.get("include_output_tokens")))
        self._saved[request.request_id] = saved
        if not isinstance(name, str) or not name:
            saved.error = f"save_hidden_states={asked!r} is neither true nor a name"
            return
        file_name = quote(name, safe="")
        if len(file_name) > MAX_NAME_BYTES:
            saved.error = f"the name has more than {MAX_NAME_BYTES} bytes"
            return
        saved.file = str(self._settings.path / f"{file_name}.safetensors")
        self._check_length(saved, saved.num_prompt_tokens)
        self._begin(request.request_id, saved)

    def _check_length(self, saved: _Saved, num_tokens: int) -> None:
        limit = self._settings.max_tokens
        if num_tokens > limit:
            saved.error = f"{num_tokens} tokens are more than max_tokens={limit}"

    def _begin(self, request_id: str, saved: _Saved) -> None:
        if saved.error is None:
            limit = self._settings.max_tokens
            num_tokens = limit if saved.has_output else saved.num_prompt_tokens
            self._begun.append(Begin(request_id, num_tokens))

    def _is_saved(self, request_id: str) -> bool:
        return request_id in self._saved and self._saved[request_id].error is None

    def skips_prefix_cache(self, request: RequestView) -> bool:
        return self._is_saved(request.request_id)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        if self._hidden_size is None and self._is_saved(request.request_id):
            return AskLater()  # the answer names the shape
        return Matched(0)

    def build_connector_meta(self, step: StepView) -> bytes:
        if not (self._saved or self._saves or self._discarded):
            return b""
        # Not empty if a request may run that is saved: then the worker gets its hidden states.
        commands = Commands(self._begun, self._saves, self._discarded)
        self._begun, self._saves, self._discarded = [], [], []
        return msgspec.msgpack.encode(commands)

    @property
    def has_pending_work(self) -> bool:
        return bool(self._saves or self._discarded)

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for metadata in output.metadata:
            self._hidden_size = msgspec.msgpack.decode(metadata, type=int)

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        request_id = request.request_id
        saved = self._saved.pop(request_id, None)
        if saved is None:
            return FinishAction()
        num_tokens = request.num_tokens - 1 if saved.has_output else saved.num_prompt_tokens
        if saved.error is None:
            self._check_length(saved, num_tokens)
            begun = [begin for begin in self._begun if begin.request_id != request_id]
            has_begun = len(begun) == len(self._begun)
            self._begun = begun
            if not has_begun or request.num_tokens <= saved.num_prompt_tokens:
                saved.error = "the request ended before its first output token"
            elif self._hidden_size is None:
                saved.error = "the workers have not reported the size of hidden states"
            if has_begun and saved.error is not None:
                self._discarded.append(request_id)
        if saved.error is not None:
            return FinishAction(params={"hidden_states_error": saved.error})
        token_ids = request.token_ids[:num_tokens].astype("<i4").tobytes()
        self._saves.append(Save(request_id, saved.file, token_ids))
        shape = [num_tokens, self._hidden_size]
        params = {"hidden_states_path": saved.file, "hidden_states_shape": shape}
        return FinishAction(params=params)

    def on_new_epoch(self, epoch: int) -> None:
        self._hidden_size = None
        self._begun, self._saves, self._discarded = [], [], []
        for request_id, saved in self._saved.items():  # they are computed again from the start
            self._begin(request_id, saved)
