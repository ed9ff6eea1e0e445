"""Hypothesis strategies for every message of the protocol."""

from typing import Any, get_args

import msgspec
import numpy as np
from hypothesis import strategies as st

from longshore.protocol.events import Medium
from longshore.protocol.handshake import (
    ClientHello,
    EngineIdentity,
    EngineReady,
    Feature,
    Rejected,
    WorkerAccepted,
    WorkerAsleep,
    WorkerHello,
    WorkerReady,
)
from longshore.protocol.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    CustomSpec,
    FullAttentionSpec,
    HeadShare,
    KVCacheConfig,
    KVCacheGroup,
    KVCapacity,
    LongestRequest,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
)
from longshore.protocol.outputs import (
    AdmissionChanged,
    EngineContinues,
    EngineFailed,
    EngineOutputs,
    EnginePaused,
    FinishedRequest,
    FinishReason,
    ModelRunnerOutput,
    RequestEvent,
    TokenLogprobs,
    TransferReport,
    WorkerFailed,
)
from longshore.protocol.plan import (
    AppendedBlocks,
    BeginSleep,
    EndSleep,
    Rewind,
    RowStart,
    RowState,
    SampleMask,
    SchedulerOutput,
    Shutdown,
)
from longshore.protocol.requests import (
    MAX_WEIGHT,
    AbortRequests,
    AddRequest,
    CacheHint,
    CachePrefix,
    ContinueSession,
    FreeText,
    LoRARequest,
    MultimodalFeature,
    PoolingParams,
    PromptEmbeds,
    RequestOptions,
    StopFound,
    StructuredOutput,
    Tenant,
)
from longshore.protocol.sampling import RepetitionDetection, SamplingParams
from longshore.protocol.statistics import (
    OPERATION_BYTES_BOUNDS,
    STEP_SECONDS_BOUNDS,
    STEP_TOKENS_BOUNDS,
    BlockHolder,
    BlockSnapshot,
    BlockState,
    DescribeBlocks,
    DescribeEngine,
    EngineReport,
    GroupUse,
    PullStats,
    SchedulerStats,
    TenantStats,
    TierStats,
    TransferOperation,
    TransferStats,
    WaitingReport,
    WorkerStats,
)

counts = st.integers(0, 2**31 - 1)
texts = st.text(max_size=12)
# Lengths on both sides of the limit above which an array is a frame of its own.
lengths = st.sampled_from([0, 1, 3, 127, 128, 129, 130, 400])


@st.composite
def arrays(draw: st.DrawFn, dtype: Any = np.int32) -> np.ndarray:
    length = draw(lengths)
    info = np.iinfo(dtype)
    first = draw(st.integers(info.min, info.max))
    values = (np.arange(length, dtype=np.int64) * 7919 + first) % (2**31)
    return values.astype(dtype)


int32s = arrays()
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1.0),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | st.integers(5, 100),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.lists(counts, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    repetition=st.none() | st.builds(RepetitionDetection, st.integers(1, 256)),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.1, 2),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.none() | st.dictionaries(counts, st.floats(-100, 100), max_size=3),
    bad_words_token_ids=st.lists(
        st.lists(counts, min_size=1, max_size=3).map(tuple), max_size=2
    ).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
float32s = st.lists(st.floats(-1, 1, width=32), max_size=200).map(
    lambda values: np.array(values, np.float32)
)
scores = st.none() | st.builds(TokenLogprobs, int32s, int32s, int32s, int32s, int32s, float32s)
loras = st.none() | st.builds(LoRARequest, texts, texts)
items = st.lists(
    st.builds(MultimodalFeature, texts, counts, counts, texts, arrays(np.uint8)), max_size=2
).map(tuple)
embeds = st.none() | st.builds(
    PromptEmbeds, arrays(np.uint8), counts, st.sampled_from(["float32", "float16", "bfloat16"])
)
poolings = st.none() | st.builds(
    PoolingParams,
    st.sampled_from(["last", "mean", "cls"]),
    st.booleans(),
    st.none() | st.integers(1, 2**31 - 1),
)
poolings |= st.just(PoolingParams("classify", normalize=False))
starts = st.builds(
    RowStart,
    row=counts,
    generation=counts,
    request_id=texts,
    num_computed_tokens=counts,
    last_computed=counts,
    prompt_token_ids=int32s,
    block_ids=st.lists(int32s, max_size=2).map(tuple),
    sampling=samplings,
    output_token_ids=int32s,
    resumed=st.booleans(),
    lora=loras,
    multimodal=items,
    prompt_embeds=embeds,
    pooling=poolings,
    has_structured_output=st.booleans(),
)
plans = st.builds(
    SchedulerOutput,
    epoch=counts,
    step=counts,
    previous_step=counts,
    num_rows=counts,
    num_scheduled_tokens=counts,
    digest=st.integers(0, 2**32 - 1),
    answered_step=counts,
    rejected_rows=int32s,
    rejected_tokens=int32s,
    finished_rows=int32s,
    preempted_rows=int32s,
    rewound=st.lists(st.builds(Rewind, counts, counts, counts), max_size=2).map(tuple),
    added=st.lists(starts, max_size=2).map(tuple),
    appended=st.lists(st.builds(AppendedBlocks, counts, int32s, int32s), max_size=2).map(tuple),
    scheduled_rows=int32s,
    scheduled_tokens=int32s,
    sampled_rows=int32s,
    sampled_tokens=int32s,
    draft_rows=int32s,
    draft_tokens=int32s,
    num_invalid_draft_tokens=counts,
    encoder_inputs=st.lists(st.tuples(counts, counts), max_size=2).map(tuple),
    freed_encoder_hashes=st.lists(texts, max_size=2).map(tuple),
    common_prefix_blocks=st.lists(counts, max_size=2).map(tuple),
    copy_source_ids=int32s,
    copy_target_ids=int32s,
    copy_num_tokens=int32s,
    zero_block_ids=int32s,
    has_structured_output=st.booleans(),
    connector_metadata=st.binary(max_size=20),
    ec_connector_metadata=st.binary(max_size=20),
    full_state=st.none()
    | st.lists(
        st.builds(RowState, counts, counts, counts, counts, st.tuples(int32s)), max_size=2
    ).map(tuple),
)
identities = st.builds(EngineIdentity, texts, texts, counts, counts, counts, counts, texts)
sizes = st.integers(1, 2**31 - 1)
attention = (sizes, sizes, sizes, sizes, st.none() | sizes)
specs = st.one_of(
    st.builds(FullAttentionSpec, *attention, sliding_window=st.none() | sizes),
    st.builds(FullAttentionSpec, *attention, attention_chunk_size=sizes),
    st.builds(SinkFullAttentionSpec, *attention, sink_tokens=sizes),
    st.builds(SlidingWindowSpec, *attention, sliding_window=sizes),
    st.builds(ChunkedLocalAttentionSpec, *attention, attention_chunk_size=sizes),
    st.builds(MLAAttentionSpec, sizes, sizes, sizes),
    st.builds(CrossAttentionSpec, *attention, max_encoder_tokens=sizes),
    st.builds(
        StateSpec,
        block_size=sizes,
        shapes=st.just(((2, 3), (4, 5))),
        dtype_bytes=st.just((2, 4)),
        channels=st.sampled_from([(), (("head", 1), ("group", 3))]),
        num_pages=st.integers(1, 2**16 - 1),
        unit_bytes=sizes,
    ),
    st.builds(CustomSpec, sizes, sizes, texts, st.dictionaries(texts, counts, max_size=2)),
)
caches = st.builds(
    KVCacheConfig,
    num_blocks=counts,
    groups=st.lists(
        st.builds(
            KVCacheGroup,
            st.lists(texts, max_size=2).map(tuple),
            specs,
        ),
        max_size=2,
    ).map(tuple),
    dtype=texts,
)
capacities = st.builds(
    KVCapacity,
    counts,
    counts,
    st.lists(specs, max_size=2).map(tuple),
    st.builds(LongestRequest, counts, st.none() | counts, counts, counts),
    counts,
)
head_shares = st.tuples(counts, st.integers(1, 9), counts).map(
    lambda drawn: HeadShare(drawn[0], drawn[1], sum(drawn))
)
ends = st.builds(
    FinishedRequest,
    handle=counts,
    reason=st.sampled_from(FinishReason),
    num_output_tokens=counts,
    stop_token_id=st.none() | counts,
    message=st.none() | texts,
    num_cached_tokens=counts,
    num_preemptions=counts,
    kv_transfer_params=st.none() | st.dictionaries(texts, texts, max_size=2),
    pooled=float32s,
    events=st.lists(st.tuples(st.sampled_from(RequestEvent), st.floats(0, 9)), max_size=3).map(
        tuple
    ),
    num_draft_tokens=counts,
    num_accepted_tokens=counts,
    session_continues=st.booleans(),
    num_nans_in_logits=counts,
    num_invalid_draft_tokens=counts,
)
worker_stats = st.builds(
    WorkerStats,
    epoch=counts,
    rank=counts,
    steps_by_seconds=st.tuples(*[counts] * (len(STEP_SECONDS_BOUNDS) + 1)),
    steps_by_tokens=st.tuples(*[counts] * (len(STEP_TOKENS_BOUNDS) + 1)),
    compute_s=st.floats(0, 9),
    num_tokens=counts,
    longest_step_s=st.floats(0, 9),
    resident_bytes=counts,
    device_bytes=counts,
)
media = st.sampled_from(get_args(Medium))
tiers = st.builds(TierStats, media, *[counts] * 8)
transfers = st.builds(
    TransferStats,
    media,
    media,
    st.tuples(*[counts] * (len(OPERATION_BYTES_BOUNDS) + 1)),
    counts,
    counts,
    st.floats(0, 9),
    *[counts] * 3,
)
operations = st.builds(
    TransferOperation, media, media, counts, counts, st.floats(0, 9), counts, counts
)
stats = st.builds(
    SchedulerStats,
    **{
        field: counts if field.startswith("num_") else st.floats(0, 2)
        for field in SchedulerStats.__struct_fields__
        if field
        not in ("accepted_by_position", "workers", "tenants", "tiers", "transfers", "pulls")
    },
    accepted_by_position=st.lists(counts, max_size=3).map(tuple),
    tenants=st.lists(st.builds(TenantStats, texts, counts, counts), max_size=2).map(tuple),
    tiers=st.lists(tiers, max_size=2).map(tuple),
    transfers=st.lists(transfers, max_size=2).map(tuple),
    pulls=st.none()
    | st.builds(PullStats, *[counts] * 4, st.dictionaries(texts, counts, max_size=2)),
    workers=st.lists(worker_stats, max_size=2).map(tuple),
)
options = st.builds(
    RequestOptions,
    priority=st.integers(-9, 9),
    tenant=st.builds(Tenant, texts, st.integers(1, MAX_WEIGHT)),
    cache_salt=st.none() | texts,
    cache_hint=st.none()
    | st.builds(
        CacheHint,
        st.floats(0, 9),
        st.none() | texts,
        st.integers(1, 3),
        st.tuples(st.builds(CachePrefix, st.integers(1, 99), st.floats(0, 9), st.integers(1, 3))),
    ),
    skip_reading_prefix_cache=st.booleans(),
    trace_headers=st.none() | st.dictionaries(texts, texts, max_size=2),
    kv_transfer_params=st.none() | st.dictionaries(texts, st.lists(counts, max_size=2), max_size=2),
    lora=loras,
    multimodal=items,
    prompt_embeds=embeds,
    pooling=poolings,
    structured_output=st.none()
    | st.builds(
        StructuredOutput,
        st.sampled_from(["json_schema", "regex"]),
        texts,
        st.none() | st.builds(FreeText, st.tuples(st.tuples(counts)), st.none() | counts),
    ),
    job_id=st.none() | texts,
    is_last_step=st.booleans(),
    resumable=st.booleans(),
    keeps_blocks=st.booleans(),
)
adds = st.builds(
    AddRequest,
    request_id=texts,
    handle=counts,
    prompt_token_ids=int32s,
    sampling=samplings,
    options=options,
    output_token_ids=int32s,
    age_s=st.floats(0, 100),
    fork_of=st.none() | counts,
)
rejections = st.builds(Rejected, texts)

TO_WORKER = {
    SchedulerOutput: plans,
    SampleMask: st.builds(SampleMask, counts, counts, int32s, arrays(np.uint8)),
    Shutdown: st.builds(Shutdown, texts),
    BeginSleep: st.builds(BeginSleep),
    EndSleep: st.builds(EndSleep),
    WorkerAccepted: st.builds(WorkerAccepted, counts, counts, st.booleans()),
    Rejected: rejections,
}
FROM_WORKER = {
    ModelRunnerOutput: st.builds(
        ModelRunnerOutput,
        epoch=counts,
        step=counts,
        sampled_tokens=int32s,
        num_sampled=int32s,
        draft_rows=int32s,
        draft_tokens=int32s,
        pooled_rows=int32s,
        pooled=st.lists(float32s, max_size=2).map(tuple),
        logprobs=scores,
        nan_rows=int32s,
        num_nans=int32s,
        failed_block_ids=int32s,
        is_out_of_memory=st.booleans(),
        connector_metadata=st.binary(max_size=9),
        compute_s=st.floats(0, 9),
        gap_s=st.none() | st.floats(0, 9),
    ),
    TransferReport: st.builds(
        TransferReport,
        epoch=counts,
        rank=counts,
        finished_sending=st.lists(texts, max_size=2).map(tuple),
        finished_receiving=st.lists(texts, max_size=2).map(tuple),
        failed_block_ids=int32s,
        connector_metadata=st.binary(max_size=9),
        ec_connector_metadata=st.binary(max_size=9),
        operations=st.lists(operations, max_size=2).map(tuple),
    ),
    WorkerStats: worker_stats,
    WorkerFailed: st.builds(WorkerFailed, counts, counts, texts, st.booleans(), st.booleans()),
    WorkerHello: st.builds(
        WorkerHello,
        counts,
        identities,
        caches,
        head_shares,
        st.lists(st.sampled_from(Feature), max_size=2).map(tuple),
    ),
    WorkerReady: st.builds(WorkerReady, counts),
    WorkerAsleep: st.builds(WorkerAsleep, counts),
}
TO_ENGINE = {
    AddRequest: adds,
    ContinueSession: st.builds(ContinueSession, counts, int32s, samplings, st.booleans()),
    AbortRequests: st.builds(AbortRequests, int32s, st.lists(texts, max_size=2).map(tuple)),
    DescribeEngine: st.just(DescribeEngine()),
    DescribeBlocks: st.just(DescribeBlocks()),
    StopFound: st.builds(StopFound, counts, counts),
    ClientHello: st.builds(ClientHello, texts, texts),
}
few = st.lists(counts, max_size=3).map(tuple)
reports = st.builds(
    EngineReport,
    engine_id=texts,
    num_running=counts,
    num_waiting=counts,
    num_blocks=counts,
    num_free_blocks=counts,
    kv_usage=st.floats(0, 1),
    steps_in_flight=counts,
    idle_s=st.floats(0, 9),
    pause=texts,
    waiting=st.lists(
        st.builds(WaitingReport, texts, texts, texts, st.floats(0, 9), counts, counts),
        max_size=2,
    ).map(tuple),
)
holders = st.builds(
    BlockHolder,
    texts,
    st.sampled_from(BlockState),
    few,
    few,
    st.integers(-1, 9),
    *[counts] * 5,
    st.floats(0, 9),
)
TO_CLIENT = {
    EngineOutputs: st.builds(
        EngineOutputs,
        handles=int32s,
        tokens=int32s,
        logprobs=scores,
        finished=st.lists(ends, max_size=3).map(tuple),
        stats=st.none() | stats,
    ),
    EngineReport: reports,
    BlockSnapshot: st.builds(
        BlockSnapshot,
        reports,
        arrays(np.uint8),
        st.lists(st.builds(GroupUse, texts, *[counts] * 4), max_size=2).map(tuple),
        counts,
        counts,
        counts,
        counts,
        st.lists(holders, max_size=2).map(tuple),
        int32s,
    ),
    EnginePaused: st.builds(EnginePaused, texts, st.booleans()),
    EngineContinues: st.builds(EngineContinues, texts),
    AdmissionChanged: st.builds(AdmissionChanged, st.none() | texts),
    EngineFailed: st.builds(EngineFailed, texts),
    EngineReady: st.builds(EngineReady, texts, identities, counts, capacities),
    Rejected: rejections,
}


def plain(value: Any) -> Any:
    """A message as nested tuples with lists for arrays, so that it can be compared."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if isinstance(value, msgspec.Struct):
        return (type(value), *map(plain, msgspec.structs.astuple(value)))
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value


def as_received(frames: list[Any]) -> list[bytes]:
    """Frames as the other end of a socket gets them."""
    return [bytes(frame) for frame in frames]
