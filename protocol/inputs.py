"""What a request brings beside its token ids: adapters, multimodal items, embeddings, grammars.

The scheduler plans with names, offsets and sizes; the data itself only passes through it.
"""

from typing import Final, Literal, TypeAlias

import msgspec

from longshore.protocol.arrays import EMPTY_UINT8, UInt8Array

MAX_DIMENSIONS: Final = 2**31 - 1

PoolingKind: TypeAlias = Literal["last", "mean", "cls"]


class LoRARequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter: its name tells it from others, its path tells the workers where it is."""

    name: str
    path: str = ""


class MultimodalFeature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One image, sound or the like: prompt positions [offset, offset + num_tokens) stand for it. To
    a model with cross attention a request brings one, for which no position stands: offset is 0.

    hash:       of its content; equal items are encoded once, but for cross attention.
    num_tokens: that the encoder makes of it.
    data:       what the workers' processor takes, opaque here; of modality "audio" for cross
                attention: mono samples at the model's rate, little-endian float32.
    """

    hash: str
    offset: int
    num_tokens: int
    modality: str = "image"
    data: UInt8Array = EMPTY_UINT8


class PromptEmbeds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt given as embeddings: row i belongs to prompt token i, whose id means nothing.

    data: the rows' bytes, (num_prompt_tokens, hidden_size) of `dtype`, little-endian.
    """

    data: UInt8Array
    hidden_size: int
    dtype: Literal["float32", "float16", "bfloat16"]

    @property
    def row_size_bytes(self) -> int:
        """Bytes of one token's embedding."""
        return self.hidden_size * (4 if self.dtype == "float32" else 2)

    def row_bytes(self, first: int, last: int) -> bytes:
        """The bytes of rows [first, last)."""
        size = self.row_size_bytes
        return self.data[first * size : last * size].tobytes()


class PoolingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for one vector instead of tokens, made of the hidden states behind the last norm.

    kind:       the state of the last token, that of the first, or the mean of all.
    normalize:  to length 1, behind the cut.
    dimensions: leading elements to keep; None, or more than there are: all.
    Raises ValueError for dimensions that are not within 1..MAX_DIMENSIONS.
    """

    kind: PoolingKind = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None and not 1 <= self.dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"dimensions={self.dimensions} must lie within 1..{MAX_DIMENSIONS}")

    @property
    def needs_all_states(self) -> bool:
        """It cannot begin behind a prefix that is cached: of that, only KV is kept."""
        return self.kind != "last"


class StructuredOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the output must match; a grammar is compiled from it before the request may run."""

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    text: str
