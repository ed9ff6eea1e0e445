"""Messages from a client to the scheduler: requests, their inputs, and what may follow a request.

A client numbers its requests with handles of its own. The scheduler plans with the names, offsets
and sizes of adapters, multimodal items, embeddings and grammars; it only passes their data on.
"""

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from longshore.protocol.arrays import EMPTY_INT32, EMPTY_UINT8, Int32Array, UInt8Array
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import DescribeEngine

MAX_NAME_CHARACTERS: Final = 1024
"""Limit for a request id, a job id, a tenant, a session and a cache salt; longer ones are
rejected."""

MAX_WEIGHT: Final = 1000

MAX_DIMENSIONS: Final = 2**31 - 1
MAX_TRANSFER_IDS: Final = 4096

PoolingKind: TypeAlias = Literal["last", "mean", "cls", "classify"]


class LoRARequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter. `name` identifies it; workers load it from `path`."""

    name: str
    path: str = ""


class MultimodalFeature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One multimodal item (image, audio, ...). Prompt positions [offset, offset + num_tokens) are
    its placeholders. For cross attention there are no placeholders: one item, offset 0.

    hash:       content hash; equal items are encoded once, except for cross attention.
    num_tokens: number of encoder output tokens.
    data:       input of the workers' processor, opaque here. For cross attention (modality
                "audio"): mono samples at the model's rate, little-endian float32.
    """

    hash: str
    offset: int
    num_tokens: int
    modality: str = "image"
    data: UInt8Array = EMPTY_UINT8


class PromptEmbeds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt given as embeddings: row i belongs to prompt token i, whose id is ignored.

    data: bytes of (num_prompt_tokens, hidden_size) elements of `dtype`, little-endian.
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
    """Asks for one vector instead of tokens, pooled from the hidden states after the final norm.

    kind:       the hidden state of the last token ("last") or first token ("cls"), or the mean of
                all tokens ("mean"); "classify": what the classification head makes of the last one,
                a score per label, before any activation.
    normalize:  scale the vector to length 1, after it is cut to `dimensions`.
    dimensions: number of leading elements to keep; all if None or larger than the vector.
    Raises ValueError if dimensions is outside 1..MAX_DIMENSIONS, or scores would be changed.
    """

    kind: PoolingKind = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None and not 1 <= self.dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"dimensions={self.dimensions} must lie within 1..{MAX_DIMENSIONS}")
        if self.kind == "classify" and (self.normalize or self.dimensions is not None):
            raise ValueError("scores of labels are not normalized or cut (kind is classify)")

    @property
    def needs_all_states(self) -> bool:
        """Whether the hidden states of all tokens are needed, so that a cached prefix, which has
        only KV, cannot be used."""
        return self.kind in ("mean", "cls")


MAX_CONSTRAINT_BYTES: Final = 128 << 10
"""Limit of the text of a `StructuredOutput`."""


class FreeText(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Output that a constraint leaves free: up to the first of `marks`, and with it.

    marks: token ids of each.
    begin: the output has such a text only if this is its first token; None: it has one.
    repeats: another such text follows what the constraint allows, and the output may end in one.
    reasoning: a free text before this one, in which marks mean nothing.
    """

    marks: tuple[tuple[int, ...], ...]
    begin: int | None = None
    repeats: bool = False
    reasoning: "FreeText | None" = None


class StructuredOutput(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Constraint on the output. It is compiled to a grammar before the request can run.

    text: of a JSON schema; of a regular expression, which the whole output matches; of a JSON array
          of strings, one of which is the output; or of a grammar in EBNF, or else for Lark. Of tool
          calls, a grammar for Lark, in which each schema has a line of its own.
    free: what is not constrained.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "tool_calls"]
    text: str
    free: FreeText | None = None


CONSTRAINT_TOO_COMPLEX: Final = "the constraint of the output is too complex"
"""Begins the message of a request whose constraint exceeded a limit while it was enforced: the
client has to change it."""

MAX_CACHE_TTL_S: Final = 86_400.0


MAX_CACHE_PRIORITY: Final = 3
MAX_CACHE_PREFIXES: Final = 8


class CachePrefix(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The first `num_tokens` tokens of a request, for which a hint asks for more."""

    num_tokens: int
    ttl_s: float
    priority: int = 1


class CacheHint(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Asks to evict the KV of a request, once it has ended, after that of requests without a hint.

    ttl_s:    seconds after the end of the request, at most MAX_CACHE_TTL_S; 0: only the prefixes.
    session:  the next request of the tenant with this name replaces the hint by its own.
    priority: 1..MAX_CACHE_PRIORITY; lower ones are evicted first.
    prefixes: at most MAX_CACHE_PREFIXES. Tokens are of use only with all tokens before them, so
              each prefix is kept as long, and has as high a priority, as any longer one.
    """

    ttl_s: float
    session: str | None = None
    priority: int = 1
    prefixes: tuple[CachePrefix, ...] = ()


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Whose request it is, for policies that share the engine between tenants.

    name:   of the API key; empty without keys.
    weight: its share, relative to those of the other tenants with requests.
    cache_share: the share of the KV cache, and of each offload tier, that its cache hints retain at
            most.
    """

    name: str = ""
    weight: Annotated[int, msgspec.Meta(ge=1, le=MAX_WEIGHT)] = 1
    cache_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25


NO_TENANT: Final = Tenant()


MAX_TURN_ENDS: Final = 2


class RequestOptions(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a request asks for beside its prompt, its sampling and its place among other requests.
    It travels whole, from what reads a client's request to the scheduler's `Request`.

    priority:          lower is more urgent; only the priority policy reads it.
    tenant:            whose request it is, for the fair policy and for cache hints.
    cache_salt:        only requests with the same salt share prefix blocks.
    cache_hint:        how long its KV is worth keeping.
    turn_ends:         numbers of leading prompt tokens with which later requests are expected to
                       begin: those that the next turns of a chat repeat. Only models with states
                       need them. Empty: all of the prompt.
    no_store:          its KV is not stored by a connector, and is cached only until it ends, for
                       other such requests of its salt.
    skip_reading_prefix_cache: compute the whole prompt even if a prefix is cached.
    trace_headers:     W3C trace context of what the request belongs to. Its spans have it.
    kv_transfer_params: for the connector; the one loose dict, its keys are defined outside.
    multimodal:        items in order of their offsets, not overlapping; exactly one if the model
                       has cross attention.
    prompt_embeds:     replaces the prompt; its token ids are placeholders then.
    pooling:           asks for a vector; the sampling is ignored then.
    structured_output: constrains its output.
    job_id, is_last_step: the agent job that this request is a turn of, and whether it is the
                       job's last turn.
    resumable:         opens a session: when the output ends, it waits for a `ContinueSession`.
    keeps_blocks:      a waiting session keeps its KV, for forks and for its own next input, until
                       another request needs the blocks.
    """

    priority: int = 0
    tenant: Tenant = NO_TENANT
    cache_salt: str | None = None
    cache_hint: CacheHint | None = None
    turn_ends: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TURN_ENDS)] = ()
    no_store: bool = False
    skip_reading_prefix_cache: bool = False
    trace_headers: dict[str, str] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    lora: LoRARequest | None = None
    multimodal: tuple[MultimodalFeature, ...] = ()
    prompt_embeds: PromptEmbeds | None = None
    pooling: PoolingParams | None = None
    structured_output: StructuredOutput | None = None
    job_id: str | None = None
    is_last_step: bool = False
    resumable: bool = False
    keeps_blocks: bool = False


NO_OPTIONS: Final = RequestOptions()


class AddRequest(
    msgspec.Struct, tag="add", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Queue one request: a new one, or one resumed on this engine with tokens already emitted.

    handle:            the client's number for it, at least 0, unique among its live requests.
    output_token_ids:  tokens already emitted. Limits, positions of random draws and usage include
                       them.
    age_s:             seconds since the request first arrived anywhere; a duration, because the
                       clocks of two hosts differ.
    fork_of:           handle of a live request of the same client. This request starts from the KV
                       of their common prefix, once that is computed. It is treated as an ordinary
                       request if the other one is unknown or has ended by then, or if the model
                       has cross attention.
    """

    request_id: str
    handle: int
    prompt_token_ids: Int32Array
    sampling: SamplingParams
    options: RequestOptions = NO_OPTIONS
    output_token_ids: Int32Array = EMPTY_INT32
    age_s: float = 0.0
    fork_of: int | None = None


class ContinueSession(
    msgspec.Struct, tag="continue", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The next input of a resumable request, appended to its tokens so far.

    `resumable` False makes this input the last. Inputs that arrive while the session runs are
    queued. Limits of `sampling` count from the end of this input.
    """

    handle: int
    prompt_token_ids: Int32Array
    sampling: SamplingParams
    resumable: bool = True


class AbortRequests(
    msgspec.Struct, tag="abort", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Abort requests. Unknown handles are ignored, as those requests may just have finished.

    transfer_ids: of the `kv_transfer_params` of ended requests: no other engine will pull their KV,
                  so their blocks are freed. Unknown ones are ignored.
    """

    handles: Int32Array
    transfer_ids: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_TRANSFER_IDS)] = ()


class StopFound(msgspec.Struct, tag="stop_found", frozen=True, forbid_unknown_fields=True):
    """The gateway found a stop string that ends in output token `num_tokens` (1-based). The request
    ends STOPPED; its output and usage are cut to that many tokens."""

    handle: int
    num_tokens: int


ClientRequest: TypeAlias = AddRequest | ContinueSession | AbortRequests | StopFound | DescribeEngine


class Malformed(msgspec.Struct, frozen=True):
    """The readable part of an invalid message about one request, so that its client gets an error.

    message: tag of `AddRequest`, `ContinueSession` or `StopFound`.
    """

    message: Literal["add", "continue", "stop_found"] = msgspec.field(name="type")
    handle: Annotated[int, msgspec.Meta(ge=0)]


_malformed_decoder: Final = msgspec.msgpack.Decoder(Malformed)


def read_malformed(header: bytes) -> Malformed | None:
    """The request that an undecodable message is about; None if it has no readable handle.

    header: the first frame of the message.
    """
    try:
        return _malformed_decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
