"""The scheduler half: which blocks are filled in the next step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from longshore.connectors.base import (
    ConnectorConfig,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
)
from longshore.connectors.options import Options
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import NULL_BLOCK, CrossAttentionSpec, CustomSpec, StateSpec


@dataclass(frozen=True, slots=True)
class DecodeBenchSettings:
    """Values are normally distributed with `fill_mean` and `fill_std`; 0 is a constant. A random
    block depends on `seed`, layer and rank, and is the same at every position."""

    fill_mean: float
    fill_std: float
    seed: int


def settings_of(config: ConnectorConfig) -> DecodeBenchSettings:
    """Raises ConfigError for invalid options, or a kind of attention without KV of tokens."""
    options = Options("decode_bench", config.options, ("fill_mean", "fill_std", "seed"))
    for spec in config.specs:
        if isinstance(spec, CrossAttentionSpec | CustomSpec):
            raise ConfigError(
                f"--kv-connector decode_bench cannot fill blocks of a {type(spec).__name__}, whose "
                "content does not consist of values per token of the prompt or states"
            )
    return DecodeBenchSettings(
        options.number("fill_mean", 0.015),
        options.number("fill_std", 0.0, minimum=0.0),
        options.integer("seed", 0, minimum=0),
    )


class DecodeBenchConnector(SchedulerConnector):
    """Matches every prompt up to its last token. Output tokens are computed, also after a
    preemption, so that it does not change them; for the same reason, no request begins with cached
    blocks, which may contain computed KV."""

    contract_version: ClassVar[int] = 2
    supports_hma = True
    chunk_blocks = 0
    is_combinable: ClassVar[bool] = False  # other connectors would store dummies as KV of a prompt
    opens_nothing: ClassVar[bool] = True
    worker_half: ClassVar[str] = "longshore.connectors.decode_bench.worker:DecodeBenchWorker"

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        settings_of(ConnectorConfig(options))

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        settings_of(config)
        self._fills: list[list[int]] = [[] for _ in config.specs]

    def skips_prefix_cache(self, request: RequestView) -> bool:
        return True

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return Matched(max(request.num_prompt_tokens - 1 - num_computed_tokens, 0))

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        for fill, table, spec in zip(self._fills, block_ids, self.config.specs, strict=True):
            filled = table
            if not isinstance(spec, StateSpec):
                filled = table[: -(-num_external_tokens // spec.block_size)]
            fill += filled[filled != NULL_BLOCK].tolist()

    def build_connector_meta(self, step: StepView) -> bytes:
        if not any(self._fills):
            return b""
        fills, self._fills = self._fills, [[] for _ in self._fills]
        return msgspec.msgpack.encode(fills)

    def on_new_epoch(self, epoch: int) -> None:
        self._fills = [[] for _ in self._fills]
