"""`longshore doctor --plan MODEL`: plans the KV cache of a model without loading it.

Reads config.json and the headers of the weight files, and imports no tensor library.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from longshore.deploy.cli.client_options import CachePlanOptions
from longshore.deploy.gateway.text.tokenizer import check_text_files
from longshore.deploy.machine.device import resolve_device
from longshore.deploy.model.folder import AudioInput, read_model_folder
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import KVCacheDtype, LongestRequest
from longshore.scheduler.config import CacheConfig
from longshore.worker.config import exact_products
from longshore.worker.kv_cache.context_share import check_context_parallel
from longshore.worker.kv_cache.plan import (
    DTYPE_BYTES,
    CacheSizes,
    block_bytes,
    check_cache_specs,
    element_bytes,
    plan_groups,
)
from longshore.worker.kv_cache.report import CacheReport, report_on
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.loading.gguf_files import has_gguf
from longshore.worker.loading.safetensors_files import has_safetensors
from longshore.worker.loading.stored_weights import StoredWeights
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.families import read_model_config
from longshore.worker.process.byte_size import byte_size


class PlanReport(msgspec.Struct, frozen=True):
    """Figures for one rank, with one pipeline stage.

    weight_bytes: bytes of the rank's shard; ignores replicated tensors, which are small.
    weight_file_bytes: of all files with weights.
    quantization: how the weights in them are quantised; None: they are floats.
    auto_tokens:  tokens that would fit with keys and values in `dtype`.
    audio:        audio input of a request to a speech model.
    whole_tokens: tokens that would fit without decode context parallelism.
    """

    model: str
    dtype: str
    kv_cache_dtype: KVCacheDtype
    tensor_parallel_size: int
    decode_context_parallel_size: int
    weight_bytes: int
    weight_file_bytes: int
    quantization: str | None
    cache: CacheReport
    auto_tokens: int
    whole_tokens: int
    audio: AudioInput | None = None


def print_plan(options: CachePlanOptions, *, as_json: bool) -> None:
    """Print what a model's KV cache needs and what will fit. Raises ConfigError for a model or
    settings that cannot be served."""
    report = plan(options)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return
    console = Console(soft_wrap=True, highlight=False)
    for table in tables(report):
        console.print(table)


def plan(options: CachePlanOptions) -> PlanReport:
    """Plan a model's KV cache. Raises ConfigError for a model or settings that cannot be served."""
    assert options.plan is not None
    folder = read_model_folder(options.plan)
    check_text_files(folder.path, folder.tokenizer_file, None)
    config = read_model_config(folder.path)
    CacheConfig(block_size=_block_size(options, config))
    config.check_split(num_shards=options.tensor_parallel_size)
    max_model_len = options.max_model_len or config.default_max_len
    if max_model_len > folder.max_model_len:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the {folder.max_model_len} tokens that "
            f"{folder.name} supports"
        )
    dtype = folder.resolve_dtype(options.dtype, resolve_device(options.device))
    kept, num_sharing = options.kv_cache_dtype, options.decode_context_parallel_size
    cache, in_dtype, whole = (
        _cache(options, config, name, DTYPE_BYTES[dtype], max_model_len, size)
        for name, size in ((kept, num_sharing), ("auto", num_sharing), (kept, 1))
    )
    weights = _weights(folder.path)
    num_bytes = 0
    if weights is not None:
        products = exact_products(resolve_device(options.device), dtype)
        num_bytes = weights.num_bytes(DTYPE_BYTES[dtype], products)
    return PlanReport(
        model=folder.name,
        dtype=dtype,
        kv_cache_dtype=kept,
        tensor_parallel_size=options.tensor_parallel_size,
        decode_context_parallel_size=num_sharing,
        weight_bytes=num_bytes // options.tensor_parallel_size,
        weight_file_bytes=0 if weights is None else weights.num_file_bytes,
        quantization=None if weights is None else weights.method,
        cache=cache,
        auto_tokens=in_dtype.num_tokens,
        audio=folder.audio,
        whole_tokens=whole.num_tokens,
    )


def _block_size(options: CachePlanOptions, config: DecoderConfig) -> int:
    return config.default_block_size if options.block_size is None else options.block_size


def _cache(
    options: CachePlanOptions,
    config: DecoderConfig,
    kv_cache_dtype: KVCacheDtype,
    dtype_bytes: int,
    max_model_len: int,
    num_sharing: int,
) -> CacheReport:
    """dtype_bytes: size of an element of the model's dtype."""
    sizes = CacheSizes(
        block_size=_block_size(options, config),
        dtype_bytes=element_bytes(kv_cache_dtype, dtype_bytes),
        num_shards=options.tensor_parallel_size,
    )
    specs = config.cache_specs(sizes)
    check_cache_specs(specs, kv_cache_dtype)
    check_context_parallel(
        specs,
        size=num_sharing,
        interleave=1,
        block_size=sizes.block_size,
        num_shards=sizes.num_shards,
        num_kv_heads=config.num_kv_heads,
    )
    groups = plan_groups(
        specs, max_model_len=max_model_len, max_num_batched_tokens=options.max_num_batched_tokens
    )
    longest = LongestRequest(
        max_model_len,
        options.max_steps_in_flight * options.max_num_batched_tokens,
        options.max_steps_in_flight,
        num_sharing,
    )
    return report_on(groups, options.kv_cache_bytes // block_bytes(groups), longest)


def _weights(model_dir: Path) -> StoredWeights | None:
    """None: there is only a config.json. Raises ConfigError for files that are not valid."""
    return find_weights(model_dir) if has_safetensors(model_dir) or has_gguf(model_dir) else None


def tables(report: PlanReport) -> list[Table]:
    """A table of the KV cache groups, and one of the totals."""
    cache = report.cache
    groups = Table(title=f"KV cache groups of {report.model}, per rank", title_justify="left")
    groups.add_column("kind", no_wrap=True)
    for column in ("groups", "layers", "tokens per block", "bytes per layer", "padding"):
        groups.add_column(column, justify="right")
    groups.add_column("blocks per request", justify="right")
    groups.caption = "layers: per group; bytes, padding: per block; blocks: maximum"
    for group, count in Counter(cache.groups).items():
        groups.add_row(
            group.kind,
            f"{count:,}",
            f"{group.num_layers:,}",
            f"{group.block_tokens:,}",
            f"{group.layer_bytes:,}",
            f"{group.padding_bytes / cache.block_bytes:.1%}",
            f"{group.max_blocks:,}",
        )
    totals = Table(title="Memory per rank", show_header=False, title_justify="left")
    for name, value in _totals(report):
        totals.add_row(name, value)
    return [groups, totals]


def _totals(report: PlanReport) -> Iterator[tuple[str, str]]:
    cache = report.cache
    num_shards = report.tensor_parallel_size
    shard = f", one of {num_shards} shards" if num_shards > 1 else ""
    yield f"weights in {report.dtype}{shard}", byte_size(report.weight_bytes)
    if report.quantization is not None:
        name = f"from files in {report.quantization}"
        yield name, byte_size(report.weight_file_bytes)
    yield (
        "KV cache (--kv-cache-bytes)",
        f"{byte_size(cache.size_bytes)}: {cache.num_blocks:,} blocks of {cache.block_bytes:,} "
        f"bytes, {cache.num_reserved_blocks:,} reserved for padding",
    )
    if cache.expanded_bytes:
        yield (
            "in addition, for long prompts",
            f"{byte_size(cache.expanded_bytes)} for keys and values expanded from latents",
        )
    request_blocks = sum(group.max_blocks for group in cache.groups)
    yield (
        f"a request of {cache.max_model_len:,} tokens",
        f"{byte_size(request_blocks * cache.block_bytes)}: {_blocks(request_blocks)}, "
        f"of which {cache.padding_share:.1%} is padding",
    )
    if cache.num_blocks_in_flight:
        yield (
            "of which for steps in flight",
            f"{_blocks(cache.num_blocks_in_flight)}: at most {cache.max_tokens_in_flight:,} tokens "
            f"in {cache.num_steps} steps (--max-num-batched-tokens)",
        )
    if cache.max_concurrency < 1:
        yield (
            "such requests that fit",
            "none, so the engine would not start: raise --kv-cache-bytes or lower --max-model-len",
        )
        return
    yield "such requests that fit", f"{cache.max_concurrency:,.2f}"
    yield "tokens that fit, in such requests", f"{cache.num_tokens:,}"
    if (audio := report.audio) is not None:
        seconds = audio.max_samples / audio.sampling_rate
        yield (
            "audio of a request",
            f"at most {seconds:g} s; {audio.num_tokens:,} encoder tokens, in one step",
        )
    if report.kv_cache_dtype != "auto":
        gain = f" ({cache.num_tokens / report.auto_tokens:.2f} times)" if report.auto_tokens else ""
        yield (
            f"tokens gained with {report.kv_cache_dtype}",
            f"{cache.num_tokens - report.auto_tokens:,}{gain}; {report.auto_tokens:,} fit in "
            f"{report.dtype}",
        )
    if report.decode_context_parallel_size > 1:
        whole = report.whole_tokens
        gain = f" ({cache.num_tokens / whole:.2f} times)" if whole else ""
        yield (
            f"tokens gained with {report.decode_context_parallel_size} context ranks",
            f"{cache.num_tokens - whole:,}{gain}; {whole:,} fit without",
        )


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count:,} blocks"
