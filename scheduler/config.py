"""Settings of the scheduler, of its KV cache, and of the process around them."""

from typing import Literal

import msgspec

from longshore.protocol.channel import Endpoint
from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import EngineIdentity


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who runs, and how much of it per step. Raises ConfigError naming the setting.

    max_num_batched_tokens:  what the workers' buffers hold in one step.
    max_num_scheduled_tokens: token budget of a step; None is `max_num_batched_tokens`.
    long_prefill_token_threshold: tokens of one prompt per step at most; 0 sets no such limit.
    enable_chunked_prefill:  off: a prompt is computed in one step or not yet.
    max_steps_in_flight:     plans that may be unanswered; 1 is synchronous scheduling.
    feed_back_tokens:        sampled ids travel to a first pipeline stage that does not sample.
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_steps_in_flight: int = 2
    feed_back_tokens: bool = False

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_num_scheduled_tokens is not None and not (
            1 <= self.max_num_scheduled_tokens <= self.max_num_batched_tokens
        ):
            raise ConfigError(
                f"max_num_scheduled_tokens={self.max_num_scheduled_tokens} must lie between 1 and "
                f"max_num_batched_tokens={self.max_num_batched_tokens}, the size of the buffers"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} must be at "
                "least 0; 0 sets no limit per prompt"
            )
        if not self.enable_chunked_prefill and self.token_budget < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill a prompt must fit one step, but the step's budget is "
                f"{self.token_budget} tokens and max_model_len={self.max_model_len}. Raise "
                "max_num_batched_tokens or enable chunked prefill."
            )
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise ConfigError(
                "long_prefill_token_threshold slices prompts, but chunked prefill is off"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy={self.policy!r} is unknown; use 'fcfs' or 'priority'")
        if not 1 <= self.max_steps_in_flight <= 2:
            raise ConfigError(
                f"max_steps_in_flight={self.max_steps_in_flight} must be 1 (synchronous) or 2"
            )
        if self.feed_back_tokens and self.max_steps_in_flight > 1:
            raise ConfigError(
                "feed_back_tokens needs max_steps_in_flight=1: with two steps in flight the second "
                "is planned before the first one's tokens are known"
            )

    @property
    def token_budget(self) -> int:
        """Tokens that one step may compute."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The block pool and the names of its blocks. Raises ConfigError naming the setting.

    num_blocks:  with the null block; None takes what the workers report.
    hash_algorithm: of block names; sha256 resists forged collisions, xxh3-128 is faster.
    """

    block_size: int = 16
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    hash_algorithm: Literal["sha256", "xxh3-128"] = "sha256"

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"block_size={self.block_size} is not a power of two; block borders are found by "
                "shifting. Use 16 or 32."
            )
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(
                f"num_blocks={self.num_blocks} leaves no block beside the null block; use 2 or more"
            )
        if self.hash_algorithm not in ("sha256", "xxh3-128"):
            raise ConfigError(
                f"hash_algorithm={self.hash_algorithm!r} is unknown; use 'sha256' or 'xxh3-128'"
            )


class SchedulerProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `python -m longshore.scheduler CONFIG.json` needs.

    engine_id:   names the engine to clients; the epoch is part of it on the wire.
    epoch:       the workers' incarnation, counted by the supervisor from 1.
    hash_seed:   hex; per deployment, so that its engines agree on block names.
    workers:     one endpoint per rank; the scheduler binds them.
    clients:     where gateways connect.
    lifeline_fd: inherited socket to the supervisor; None when started by hand.
    """

    scheduler: SchedulerConfig
    cache: CacheConfig
    identity: EngineIdentity
    workers: tuple[Endpoint, ...]
    clients: Endpoint
    hash_seed: str
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    engine_id: str = "engine-0"
    epoch: int = 1
    verify_plan: bool = False
    lifeline_fd: int | None = None
    runtime_dir: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        try:
            bytes.fromhex(self.hash_seed)
        except ValueError:
            raise ConfigError("hash_seed is not hexadecimal; give 32 random bytes as hex") from None
