"""Client to scheduler: a request, with what it brings beside its token ids, and what may follow it.

A client numbers its requests with handles of its own. The scheduler plans with names, offsets and
sizes of adapters, multimodal items, embeddings and grammars; their data only passes through it.
"""

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from longshore.protocol.arrays import EMPTY_INT32, EMPTY_UINT8, Int32Array, UInt8Array
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import DescribeEngine

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


MAX_NAME_CHARACTERS: Final = 1024
"""Of a request id, a job id and a cache salt; longer ones are refused."""


class AddRequest(
    msgspec.Struct, tag="add", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Queue one request: a new one, or one that goes on elsewhere with tokens already emitted.

    handle:            the client's number for it, at least 0, unique among its live requests.
    output_token_ids:  already emitted; limits, positions of random draws and usage count from them.
    priority:          lower is more urgent; only the priority policy looks at it.
    age_s:             seconds since the request first arrived anywhere; a duration, because clocks
                       of two hosts do not agree.
    cache_salt:        prefix blocks are shared only among requests of the same salt.
    skip_reading_prefix_cache: compute everything, although a prefix may be cached.
    kv_transfer_params: for the connector; the one loose dict, its keys are defined outside.
    multimodal:        items in order of their offsets, which do not overlap; exactly one if the
                       model has cross attention.
    prompt_embeds:     stands for the prompt; its token ids are placeholders then.
    pooling:           asks for a vector; `sampling` means nothing then.
    job_id, is_last_step: the agent's job this request is a turn of, and whether another follows.
    resumable:         a session: when its output ends it waits for a `ContinueSession`.
    keeps_blocks:      of a session: while it waits it holds its KV, for others to fork and for its
                       own next input, as long as nobody else needs the room.
    fork_of:           handle of a live request of the same client: this one begins with its KV, as
                       far as their tokens agree, once that is computed. If it has ended by then,
                       or never was, or the model has cross attention, this is a request like any
                       other.
    """

    request_id: str
    handle: int
    prompt_token_ids: Int32Array
    sampling: SamplingParams
    output_token_ids: Int32Array = EMPTY_INT32
    priority: int = 0
    age_s: float = 0.0
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    trace_headers: dict[str, str] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    lora: LoRARequest | None = None
    multimodal: tuple[MultimodalFeature, ...] = ()
    prompt_embeds: PromptEmbeds | None = None
    pooling: PoolingParams | None = None
    structured_output: StructuredOutput | None = None
    job_id: str | None = None
    is_last_step: bool = True
    resumable: bool = False
    keeps_blocks: bool = False
    fork_of: int | None = None


Handle: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class MalformedAdd(msgspec.Struct, tag="add", frozen=True):
    """What can be read of an `AddRequest` that is none: its client need not wait for ever."""

    handle: Handle


class ContinueSession(
    msgspec.Struct, tag="continue", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The next input of a resumable request: it goes on behind what it has computed so far.

    `resumable` False makes this the last one. Chunks that come while the session still runs wait
    their turn. Limits of `sampling` count from the end of this chunk.
    """

    handle: int
    prompt_token_ids: Int32Array
    sampling: SamplingParams
    resumable: bool = True


class AbortRequests(msgspec.Struct, tag="abort", frozen=True, forbid_unknown_fields=True):
    """The client lost interest. Unknown handles are ignored: they may just have finished."""

    handles: Int32Array


class StopFound(msgspec.Struct, tag="stop_found", frozen=True, forbid_unknown_fields=True):
    """The gateway saw a stop string end in output token `num_tokens` (1-based): the request ends
    STOPPED, its output and usage cut to that many tokens."""

    handle: int
    num_tokens: int


class MalformedContinue(msgspec.Struct, tag="continue", frozen=True):
    """As `MalformedAdd`, of a `ContinueSession`."""

    handle: Handle


class MalformedStop(msgspec.Struct, tag="stop_found", frozen=True):
    """As `MalformedAdd`, of a `StopFound`."""

    handle: Handle


ClientRequest: TypeAlias = AddRequest | ContinueSession | AbortRequests | StopFound | DescribeEngine

Malformed: TypeAlias = MalformedAdd | MalformedContinue | MalformedStop


_malformed: Final[msgspec.msgpack.Decoder[Malformed]] = msgspec.msgpack.Decoder(Malformed)


def read_malformed(header: bytes) -> Malformed | None:
    """header: of a message that could not be decoded; None unless somebody waits for what comes of
    it, and its handle says who."""
    try:
        return _malformed.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
