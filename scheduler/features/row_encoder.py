"""Models with an encoder of their own (cross attention): what a step encodes, and for whom.

A request brings one item, which stands for no positions of its prompt. It is encoded in the very
step in which the request takes a row, in each of its lives, straight into the row's blocks of the
cross attention's group. So nothing of it is kept elsewhere, nothing is shared, and a row that is
sent back has it still.
"""

from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import KVCacheConfig, max_encoder_tokens
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.features.encoder import EncoderCache
from longshore.scheduler.request import Request


class RowEncoder(EncoderCache):
    """An encoder cache that keeps nothing: all there is to it is the budget of a step.

    budget: tokens encoded per step.
    """

    def __init__(self, *, budget: int) -> None:
        super().__init__(capacity=0, budget=budget)
        self._new_rows: list[int] = []

    def begin_step(self) -> None:
        super().begin_step()
        self._new_rows = []

    def would_limit(self, request: Request, num_computed: int, num_tokens: int) -> int:
        return num_tokens if request.num_encoder_tokens <= self._budget_left else 0

    def admit(self, request: Request, num_computed: int, num_tokens: int) -> None:
        self._budget_left -= request.num_encoder_tokens
        self._new_rows.append(request.row)

    def rewound(self, request: Request) -> None:
        """Its blocks hold the item still."""

    def waits_for(self, request: Request) -> str | None:
        if request.num_encoder_tokens <= self._budget_left:
            return None
        return (
            f"its turn at the encoder: a step encodes max_num_encoder_input_tokens={self._budget} "
            f"tokens, of which the last one has {self._budget_left} left, and it brings "
            f"{request.num_encoder_tokens}"
        )

    def take_encoder_inputs(self) -> tuple[tuple[int, int], ...]:
        inputs, self._new_rows = tuple([(row, 0) for row in self._new_rows]), []
        return inputs


def make_encoder(config: SchedulerConfig, kv_cache: KVCacheConfig) -> EncoderCache:
    """The one for a model with these groups."""
    budget = config.max_num_encoder_input_tokens
    if max_encoder_tokens(kv_cache.groups) is not None:
        return RowEncoder(budget=budget)
    return EncoderCache(capacity=config.encoder_capacity, budget=budget)


def check_encoder(config: SchedulerConfig, kv_cache: KVCacheConfig, *, has_connector: bool) -> None:
    """Raise ConfigError for settings that a model with cross attention cannot be run with."""
    num_tokens = max_encoder_tokens(kv_cache.groups)
    if num_tokens is None:
        return
    if config.max_num_encoder_input_tokens < num_tokens:
        raise ConfigError(
            f"max_num_encoder_input_tokens={config.max_num_encoder_input_tokens} is less than the "
            f"{num_tokens} tokens that this model's encoder makes of one request, so that none "
            f"could ever be admitted; set it to {num_tokens} or more"
        )
    if has_connector:
        raise ConfigError(
            "this model has cross attention and cannot be run with kv_connector: connectors find "
            "KV by the tokens before it, and this model's follows from what its encoder hears"
        )
