"""Derives the plan of an engine from the user's settings. What does not fit is rejected before
anything is started."""

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from longshore.connectors.base import ConnectorConfig, ECTransferConfig
from longshore.connectors.encoder_registry import check_encoder_connector
from longshore.connectors.offloading.disk.opening import check_path
from longshore.connectors.registry import (
    check_connector,
    check_verify_kv,
    engine_fields,
    load_scheduler_connector,
    opens_nothing,
    parse_options,
)
from longshore.deploy.machine.device import resolve_device
from longshore.deploy.model.folder import ModelFolder, find_model_folder
from longshore.deploy.requests.tracing import check_endpoint
from longshore.deploy.settings.options import EngineOptions
from longshore.deploy.supervisor.connector_options import (
    connector_names,
    disk_tiers,
    pull_options,
    with_variables,
)
from longshore.deploy.supervisor.replica import Replica
from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import EngineIdentity, hash_seed_digest
from longshore.protocol.install_command import install_command
from longshore.protocol.kv_cache_spec import (
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    LongestRequest,
    StateSpec,
    check_holds_one_request,
    num_blocks_needed,
)
from longshore.protocol.settings import part_of
from longshore.scheduler.config import (
    CacheConfig,
    SchedulerConfig,
    check_preemption_mode,
    check_states,
)
from longshore.scheduler.process.settings import StructuredOutputBackend
from longshore.scheduler.process.structured_output.schema_support import installed_backends
from longshore.scheduler.queue.outside_policies import load_policy
from longshore.worker.config import (
    check_memory_shares,
)
from longshore.worker.drafting.draft_layers import DraftLayers, find_draft_layers
from longshore.worker.drafting.drafter import load_drafter
from longshore.worker.kv_cache.context_share import check_context_parallel
from longshore.worker.kv_cache.plan import (
    DTYPE_BYTES,
    CacheSizes,
    block_bytes,
    check_cache_specs,
    element_bytes,
    plan_groups,
)
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.loading.stored_weights import StoredWeights
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.families import check_weights, read_model_config
from longshore.worker.process.byte_size import byte_size

logger = logging.getLogger(__name__)
ONLY: Final = Replica()
_DEFAULT_POLICY: Final = "fcfs"


@dataclass(frozen=True)
class EnginePlan:
    """One engine with its workers: all settings derived, nothing started.

    hash_seed: seed of block hashes; secret.
    state_dir:         the directory that outlives the deployment.
    connector_options: options of the connector, parsed; they can contain secrets.
    ec_transfer: the encoder connector, with its options, likewise; None: there is none.
    keeps_states: layers of the model have recurrent states.
    """

    options: EngineOptions
    model: ModelFolder
    device: str
    identity: EngineIdentity
    scheduler: SchedulerConfig
    cache: CacheConfig
    hash_seed: bytes = field(repr=False)
    state_dir: Path
    connector_options: dict[str, Any] = field(repr=False)
    ec_transfer: ECTransferConfig | None = field(repr=False)
    keeps_states: bool = False

    @cached_property
    def weights(self) -> StoredWeights:
        """Read from the headers of the files, once. Raises as `find_weights`."""
        return find_weights(self.model.path)

    @property
    def weight_bytes(self) -> int:
        """Of all weights, in memory."""
        dtype = self.identity.dtype
        products = self.options.quantised_products(self.device, dtype)
        return self.weights.num_bytes(DTYPE_BYTES[dtype], products)


def plan_engine(
    options: EngineOptions, model: ModelFolder, hash_seed: bytes | None = None
) -> EnginePlan:
    """Derive every component's settings. Raises ConfigError for settings that do not fit.

    hash_seed: of block hashes; None: that of the state directory.
    """
    _check_policy(options.scheduling_policy or _DEFAULT_POLICY)
    _check_trace_path(options.sched_trace_path)
    record_path(options, ONLY)
    _check_backend(options.structured_output_backend)
    check_endpoint(options.otlp_traces_endpoint)
    options = _with_draft_folder(options)
    config = read_model_config(model.path)
    config.check_split(
        num_shards=options.tensor_parallel_size, num_stages=options.pipeline_parallel_size
    )
    num_sharing = options.decode_context_parallel_size
    connector_options = with_variables(parse_options(options.kv_connector_config))
    if options.kv_connector is not None:
        if config.is_bidirectional:
            raise ConfigError(
                f"kv_connector={options.kv_connector!r}: the tokens of this model attend to later "
                "ones, so its KV cannot be reused. Remove kv_connector"
            )
        if options.verify_kv is not None:
            check_verify_kv(options.kv_connector)
            connector_options["verify_kv"] = options.verify_kv
        check_connector(options.kv_connector, connector_options)
    if options.enable_return_routed_experts and not getattr(config, "num_experts", 0):
        raise ConfigError(
            "enable_return_routed_experts: this model has no mixture of experts. Remove "
            "enable_return_routed_experts"
        )
    ec_transfer = _ec_transfer(options, config)
    device = resolve_device(options.device)
    check_memory_shares(options.kv_memory_fraction, options.gpu_memory_utilization)
    if options.gpu_memory_utilization is not None and device == "cpu":
        logger.warning(
            "gpu_memory_utilization=%g has no effect on a CPU, whose memory other programs use, "
            "too. kv_memory_fraction sets the share of the memory left after loading that the KV "
            "cache takes, and num_blocks its size",
            options.gpu_memory_utilization,
        )
    cache = _cache_config(options, config)
    dtype = model.resolve_dtype(options.dtype, device)
    sizes = CacheSizes(
        block_size=cache.block_size,
        dtype_bytes=element_bytes(options.kv_cache_dtype, DTYPE_BYTES[dtype]),
        num_shards=options.tensor_parallel_size,
    )
    specs = config.cache_specs(sizes)
    _check_drafts(options, config, specs)
    draft_layers = find_draft_layers(options.drafts, model.path, config)
    if draft_layers is not None:
        _check_draft_layers(options, draft_layers)
        specs |= draft_layers.cache_specs(sizes)
    check_cache_specs(specs, options.kv_cache_dtype)
    check_context_parallel(
        specs,
        size=num_sharing,
        interleave=options.cp_kv_cache_interleave_size,
        block_size=cache.block_size,
        num_shards=options.tensor_parallel_size,
        num_kv_heads=config.num_kv_heads,
    )
    scheduler = _scheduler_config(
        options, config, max_model_len=_max_model_len(options, model, config, specs)
    )
    if draft_layers is not None:
        draft_layers.check_length(scheduler.max_model_len)
    check_states(scheduler, specs.values())
    check_preemption_mode(scheduler, cache)
    if options.num_blocks is not None:
        groups = _groups(options, specs, scheduler.max_model_len)
        longest = scheduler.longest_request(num_sharing)
        check_holds_one_request(groups, options.num_blocks, longest)
    state_dir = StateDir(options.state_dir)
    if hash_seed is None:
        hash_seed = state_dir.block_hash_seed()
    identity = EngineIdentity(
        model_fingerprint=options.fingerprint(model.path),
        dtype=dtype,
        block_size=cache.block_size,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        kv_cache_dtype=options.kv_cache_dtype,
        decode_context_parallel_size=num_sharing,
        cp_kv_cache_interleave_size=options.cp_kv_cache_interleave_size,
        hash_seed_digest=hash_seed_digest(hash_seed),
    )
    plan = EnginePlan(
        options=options,
        model=model,
        device=device,
        identity=identity,
        scheduler=scheduler,
        cache=cache,
        hash_seed=hash_seed,
        state_dir=state_dir.path.absolute(),
        connector_options=connector_options,
        ec_transfer=ec_transfer,
        keeps_states=any(isinstance(spec, StateSpec) for spec in specs.values()),
    )
    _check_connector_fits(plan, _groups(options, specs, scheduler.max_model_len))
    return plan


def _check_connector_fits(plan: EnginePlan, groups: tuple[KVCacheGroup, ...]) -> None:
    """Build the scheduler half of the connector, which raises ConfigError if it does not fit the
    engine. Those of other libraries may open something, and stages have blocks of other sizes."""
    name, options = plan.options.kv_connector, plan.connector_options
    if name is None or plan.options.pipeline_parallel_size > 1:
        return
    if not all(map(opens_nothing, connector_names(name, options))):
        return
    kv_cache = KVCacheConfig(
        plan.options.num_blocks or num_blocks_needed(groups, _longest_request(plan)),
        groups,
        plan.identity.kv_cache_dtype,
    )
    fields = engine_fields(
        plan.identity,
        kv_cache,
        options=options,
        rank_block_bytes=(block_bytes(groups),) * plan.options.num_ranks,
        engine_id="",
        epoch=0,
    )
    fields["hash_block_size"] = plan.cache.tokens_per_hash
    load_scheduler_connector(name, ConnectorConfig(**fields))


def _check_quantization(plan: EnginePlan) -> None:
    """Raise ConfigError if the weights are not quantised as the settings say."""
    weights, dtype = plan.weights, plan.identity.dtype
    wanted = plan.options.quantization
    if wanted is not None and wanted != weights.method:
        found = "floats" if weights.method is None else f"stored as {weights.method}"
        raise ConfigError(
            f"quantization={wanted!r}, but the weights of {plan.model.name} are {found}. Remove "
            "quantization: the model's folder says how they are stored, and weights are not "
            "quantised at the start"
        )
    if weights.method is not None:
        logger.info(
            "the weights are stored as %s and computed in %s: %s in the files, %s in memory",
            weights.method,
            dtype,
            byte_size(weights.num_file_bytes),
            byte_size(plan.weight_bytes),
        )


def _longest_request(plan: EnginePlan) -> LongestRequest:
    return plan.scheduler.longest_request(plan.options.decode_context_parallel_size)


def check_host(plan: EnginePlan) -> None:
    """Raise ConfigError if the engine's workers could not load the weights, open the disk tier or
    listen for pulls on this host, before any process is started."""
    if plan.options.load_format == "auto":
        check_weights(read_model_config(plan.model.path), plan.weights)
        _check_quantization(plan)
    for path, size_bytes in disk_tiers(plan.options.kv_connector, plan.connector_options):
        check_path(path, 1, size_bytes, plan.options.num_ranks)
    pull = pull_options(plan.options.kv_connector, plan.options.kv_connector_config)
    if pull is not None:
        _check_address(pull.host)


def _check_address(host: str) -> None:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(*found[:3]) as listener:
            listener.bind(found[4])
    except OSError as error:
        raise ConfigError(
            f"--kv-connector-config: 'host' is {host!r}, where this machine cannot listen "
            f"({error.strerror}). Set it to an address of this machine that other engines reach."
        ) from error


def _cache_config(options: EngineOptions, config: DecoderConfig) -> CacheConfig:
    return part_of(
        CacheConfig,
        options,
        block_size=config.default_block_size if options.block_size is None else options.block_size,
        enable_prefix_caching=options.enable_prefix_caching and not config.is_bidirectional,
    )


def _scheduler_config(
    options: EngineOptions, config: DecoderConfig, *, max_model_len: int
) -> SchedulerConfig:
    max_num_batched_tokens, drafts = options.max_num_batched_tokens, options.drafts
    if config.is_bidirectional:  # a step computes whole prompts
        max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
    return part_of(
        SchedulerConfig,
        options,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_encoder_input_tokens=_max_num_encoder_input_tokens(options, config),
        enable_chunked_prefill=options.enable_chunked_prefill and not config.is_bidirectional,
        policy=options.scheduling_policy or _DEFAULT_POLICY,
        max_steps_in_flight=options.max_steps_in_flight,
        num_speculative_tokens=0 if drafts is None else drafts.num_drafts,
        num_lookahead_tokens=drafts.num_drafts if drafts is not None and drafts.keeps_kv else 0,
        feed_back_tokens=options.pipeline_parallel_size > 1,
    )


def _check_drafts(
    options: EngineOptions, config: DecoderConfig, specs: Mapping[str, KVCacheSpec]
) -> None:
    """Raise ConfigError if there is no such drafter, or the model cannot verify drafts."""
    drafts = options.drafts
    if drafts is None:
        return
    if not drafts.keeps_kv:
        load_drafter(drafts)
    has_states = any(isinstance(spec, StateSpec) for spec in specs.values())
    why = None
    if not config.has_head:
        why = "it samples no tokens"
    elif config.max_encoder_tokens:
        why = "it has an encoder"
    elif has_states:
        why = "it keeps states, which cannot be rewound after a rejected draft yet"
    if why is not None:
        raise ConfigError(
            f"speculative_config is not supported for this model: {why}. Remove speculative_config"
        )


def _with_draft_folder(options: EngineOptions) -> EngineOptions:
    """The draft model by its folder, whatever it was named by. Raises ConfigError."""
    drafts = options.drafts
    if drafts is None or drafts.model is None:
        return options
    folder = find_model_folder(drafts.model, StateDir(options.state_dir).path).absolute()
    resolved = msgspec.structs.replace(drafts, model=str(folder))
    return replace(options, speculative_config=msgspec.json.encode(resolved).decode())


def _check_draft_layers(options: EngineOptions, layers: DraftLayers) -> None:
    """Raise ConfigError if the ranks of this engine cannot compute them."""
    layers.config.check_split(num_shards=options.tensor_parallel_size)
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if getattr(options, name) > 1:
            raise ConfigError(
                f"speculative_config: method {layers.method!r} is not supported with {name} yet. "
                "Use ngram or suffix, or remove one of them"
            )


def _check_policy(name: str) -> None:
    """Raise ConfigError for an unknown policy, before the model is loaded."""
    try:
        load_policy(name)
    except ConfigError as error:
        raise ConfigError(f"scheduling_policy={name!r}: {error}") from error


def _check_trace_path(name: Path | str | None) -> None:
    """Raise ConfigError if no file can be created there, before anything is started."""
    if name is None:
        return
    path = Path(name)
    if path.is_dir() or not path.name:
        raise ConfigError(f"sched_trace_path={path} is a folder; give it the name of a file")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"sched_trace_path={path}: {path.absolute().parent} is not a folder that this user may "
            "write to"
        )


def _check_backend(name: StructuredOutputBackend) -> None:
    """Raise ConfigError for a backend that is not installed."""
    if name != "auto" and not installed_backends(name):
        command = install_command(name) if name == "xgrammar" else f"pip install {name}"
        raise ConfigError(
            f"structured_output_backend={name!r}: the package is not installed; run {command}"
        )


def trace_path(plan: EnginePlan, replica: Replica = ONLY) -> Path | None:
    """The file of the engine's scheduler trace: with several engines, one each."""
    if plan.options.sched_trace_path is None:
        return None
    path = Path(plan.options.sched_trace_path).absolute()  # `LLM` may be given a string
    return path.with_name(replica.file_name(path.stem) + path.suffix)


def record_path(options: EngineOptions, replica: Replica) -> str | None:
    """Each engine has files of its own."""
    if options.record is None:
        return None
    path = options.record.absolute()
    if not path.parent.is_dir():
        raise ConfigError(f"record={options.record}: there is no folder {path.parent}")
    return str(path) if replica.count == 1 else f"{path}.{replica.engine_id}"


def _ec_transfer(options: EngineOptions, config: DecoderConfig) -> ECTransferConfig | None:
    """Raises ConfigError."""
    name, role = options.ec_connector, options.ec_role
    if name is None:
        return None
    if not config.max_encoder_tokens:
        raise ConfigError(
            f"ec_connector={name!r}: this model has no encoder, so there are no encoder outputs to "
            "hand over. Remove ec_connector"
        )
    given = parse_options(options.ec_connector_config, "--ec-connector-config")
    values = with_variables(given)
    check_encoder_connector(name, values, role)
    return ECTransferConfig(name, role, msgspec.json.encode(values).decode())


def _max_num_encoder_input_tokens(options: EngineOptions, config: DecoderConfig) -> int:
    """The given value, else what one request needs; 0 for a model without an encoder."""
    given, needed = options.max_num_encoder_input_tokens, config.max_encoder_tokens
    if given is None:
        return needed
    if not needed:
        raise ConfigError(
            f"max_num_encoder_input_tokens={given}, but this model has no encoder. Remove it."
        )
    if given < needed:
        raise ConfigError(
            f"max_num_encoder_input_tokens={given} is too small: this model's encoder produces "
            f"{needed} tokens per request, in one step. Use at least {needed}."
        )
    return given


def _max_model_len(
    options: EngineOptions,
    model: ModelFolder,
    config: DecoderConfig,
    specs: Mapping[str, KVCacheSpec],
) -> int:
    """The given value, else the model's own limit, reduced to what `num_blocks` can hold."""
    if options.max_model_len is None:
        if options.num_blocks is None:
            return config.default_max_len
        num_steps = options.max_steps_in_flight
        step_tokens = options.max_num_scheduled_tokens or options.max_num_batched_tokens
        longest, too_long = 1, config.default_max_len + 1
        while too_long - longest > 1:
            length = (longest + too_long) // 2
            groups = _groups(options, specs, length)
            request = LongestRequest(
                length,
                num_steps * step_tokens,
                num_steps,
                options.decode_context_parallel_size,
            )
            if num_blocks_needed(groups, request) <= options.num_blocks:
                longest = length
            else:
                too_long = length
        return longest
    if options.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len={options.max_model_len} is more than the {model.max_model_len} tokens "
            f"that {model.name} supports (max_position_embeddings in its config.json)"
        )
    return options.max_model_len


def _groups(
    options: EngineOptions, specs: Mapping[str, KVCacheSpec], max_model_len: int
) -> tuple[KVCacheGroup, ...]:
    return plan_groups(
        specs,
        max_model_len=max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
