"""The settings of speculative decoding, with vLLM's names."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from longshore.protocol.errors import ConfigError

MAX_DRAFTS: Final = 64
"""Of a row in a step. Each takes a token of the step's budget and a row of logits."""

MAX_CACHED_REQUESTS: Final = 1 << 20

DRAFT_MODEL: Final = "draft_model"
MTP: Final = "mtp"
EAGLE3: Final = "eagle3"

_ALIASES: Final = {"deepseek_mtp": MTP}
"""Earlier names in vLLM."""

_ELSEWHERE: Final = {
    "draft_tensor_parallel_size": "a draft model is divided as the model is",
    "quantization": "the folder of a draft model says how its weights are stored",
    "disable_by_batch_size": "drafts follow their acceptance and the measured time of steps",
    "rejection_sample_method": "a draft is accepted if it is the token that is sampled",
}


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How drafts are made. Raises ConfigError naming the wrong setting.

    method:                 a drafter's name.
    model:                  folder or name of the draft model (`draft_model`) or drafter (`eagle3`).
    num_speculative_tokens: the most drafts of a request in a step.
    prompt_lookup_min, prompt_lookup_max: tokens that must have occurred before for what followed
                            them to be a draft (`ngram`).
    suffix_decoding_max_tree_depth: the most tokens that are compared (`suffix`).
    suffix_decoding_max_cached_requests: recent requests in whose outputs drafts of others are
                            looked up, too.
    suffix_decoding_max_spec_factor: the most drafts per token that is equal.
    suffix_decoding_min_token_prob: drafts end where less than this share of the occurrences agrees.
    options:                of a drafter of another package.
    """

    method: str
    model: str | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] | None = None
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] | None = None
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=MAX_DRAFTS)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0, le=MAX_CACHED_REQUESTS)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0, le=64)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0, le=1)] = 0.1
    options: dict[str, Any] = {}

    @property
    def num_drafts(self) -> int:
        """The most drafts of a request in a step."""
        given = self.num_speculative_tokens
        return self.suffix_decoding_max_tree_depth if given is None else given

    @property
    def keeps_kv(self) -> bool:
        """Whether the drafter has weights, and KV of its own in the blocks of each request."""
        return self.method in (DRAFT_MODEL, MTP, EAGLE3)

    @property
    def lookup(self) -> tuple[int, int]:
        """The fewest and the most tokens that `ngram` compares; vLLM's defaults."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None:
            return (5, 5) if high is None else (high, high)
        return low, low if high is None else high


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Raises ConfigError."""
    try:
        given = msgspec.json.decode(text)
        for name, why in _ELSEWHERE.items():
            if isinstance(given, dict) and name in given:
                raise ConfigError(f"speculative_config: {name!r}: {why}. Remove it.")
        config = msgspec.convert(given, SpeculativeConfig)
        config = replace(config, method=_ALIASES.get(config.method, config.method))
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"speculative_config: {error}. It is a JSON object such as "
            '{"method": "suffix", "num_speculative_tokens": 8}'
        ) from None
    if config.num_speculative_tokens is None and config.method != "suffix":
        raise ConfigError(
            "speculative_config has no num_speculative_tokens: say how many drafts of a request a "
            "step verifies at most"
        )
    if (config.method in (DRAFT_MODEL, EAGLE3)) != (config.model is not None):
        raise ConfigError(
            f"speculative_config: methods {DRAFT_MODEL!r} and {EAGLE3!r}, and no other ones, have "
            "a model: its folder or name"
        )
    low, high = config.lookup
    if low > high:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min={low} is more than prompt_lookup_max={high}"
        )
    return config
