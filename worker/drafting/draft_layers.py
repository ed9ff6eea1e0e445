"""The layers of a drafter with weights, which have KV in the blocks of the model's own layers.

The KV at position j is made from the tokens up to j (and, for `mtp`, the model's hidden state of
j - 1). So a block's hash proves its draft KV too: it is found, evicted, offloaded and pulled with
the block. Does not import torch, so that a KV cache can be planned without loading anything.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import (
    DRAFT_PREFIX,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from longshore.worker.drafting.config import EAGLE3, MTP, SpeculativeConfig
from longshore.worker.drafting.eagle_config import read_eagle_config
from longshore.worker.kv_cache.plan import CacheSizes, cache_name
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.families import read_model_config

_OF_TOKENS: Final = (
    FullAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
    MLAAttentionSpec,
)


@dataclass(frozen=True)
class DraftLayers:
    """Where a drafter's weights are, and its layers.

    model_dir: folder of the weights.
    config:    of the draft model or drafter; for `mtp` that of the model, whose next layer it is.
    """

    method: str
    model_dir: Path
    config: DecoderConfig

    def cache_specs(self, sizes: CacheSizes) -> dict[str, KVCacheSpec]:
        """The specs of its cached layers, by `draft_name`."""
        config = self.config
        if self.method == MTP:
            specs = {cache_name(config.num_layers): config.cache_spec(config.num_layers, sizes)}
        else:
            specs = config.cache_specs(sizes)
        return {draft_name(name): spec for name, spec in specs.items()}

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads the model's hidden states; then a row may compute a token once more."""
        return self.method in (MTP, EAGLE3)

    def check_length(self, max_model_len: int) -> None:
        """Raise ConfigError if it has no positions for requests of so many tokens. What folders of
        EAGLE drafters say is the length of their training, beyond which they are used."""
        longest = self.config.max_supported_len
        if max_model_len > longest and self.method != EAGLE3:
            raise ConfigError(
                f"speculative_config: {self.model_dir} has positions for {longest} tokens, but "
                f"max_model_len is {max_model_len}. Lower max_model_len, or use another draft model"
            )


def draft_name(name: str) -> str:
    """Cache name of a drafter's layer. name: as a layer of a model."""
    return DRAFT_PREFIX + name


def find_draft_layers(
    drafts: SpeculativeConfig | None, model_dir: Path, config: DecoderConfig
) -> DraftLayers | None:
    """The layers of the drafter for this model; None: it has no weights. Raises ConfigError
    (UnsupportedModel among them) for a draft model that cannot be served."""
    if drafts is None or not drafts.keeps_kv:
        return None
    if drafts.model is None:
        if not config.num_mtp_layers:
            raise ConfigError(
                f"speculative_config: method {drafts.method!r} needs a model with layers for "
                "multi-token prediction, which this one has not. Use another method"
            )
        return DraftLayers(drafts.method, model_dir, config)
    draft_dir = Path(drafts.model)
    if drafts.method == EAGLE3:
        return DraftLayers(drafts.method, draft_dir, read_eagle_config(draft_dir, config))
    draft = read_model_config(draft_dir)
    specs = draft.cache_specs(CacheSizes(block_size=1, dtype_bytes=1)).values()
    if not draft.has_head or draft.max_encoder_tokens or draft.is_bidirectional:
        why = "it does not generate text from text"
    elif not all(isinstance(spec, _OF_TOKENS) for spec in specs):
        why = "it has layers with states, which cannot be rewound after a rejected draft"
    else:
        return DraftLayers(drafts.method, draft_dir, draft)
    raise ConfigError(f"speculative_config: {draft_dir} cannot be a draft model: {why}")
