"""One rank, assembled: the model in memory, the KV cache and the model runner.

There are two phases, because all ranks agree on the number of blocks between them. The constructor
loads the weights and measures memory; `start` allocates the KV cache and returns the model runner.
"""

import contextlib
import gc
import logging
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import torch

from longshore.connectors.base import EncoderWorker, EncoderWorkerConfig, WorkerConnector
from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import Feature
from longshore.protocol.kv_cache_spec import (
    DEFAULT_STEPS_IN_FLIGHT,
    FP8_E4M3,
    KVCacheConfig,
    KVCacheGroup,
    LongestRequest,
    check_holds_one_request,
    max_blocks,
    num_reserved_blocks,
)
from longshore.protocol.routed_experts import (
    RoutedExpertsShape,
    check_longest,
    group_with_experts,
    map_slots,
)
from longshore.worker.attention import selector
from longshore.worker.attention.grouped import GroupedAttention
from longshore.worker.attention.kind import CachedLayer
from longshore.worker.config import QuantisedProducts, WorkerConfig
from longshore.worker.drafting.config import MTP
from longshore.worker.drafting.draft_layers import find_draft_layers
from longshore.worker.drafting.drafter import Drafter, load_drafter
from longshore.worker.drafting.eagle import EagleDrafter
from longshore.worker.drafting.eagle_config import EagleConfig
from longshore.worker.drafting.mtp import MtpDrafter
from longshore.worker.drafting.network import DraftModel, DraftNetwork
from longshore.worker.errors import OutOfMemory, UnsupportedModel
from longshore.worker.kernels import native
from longshore.worker.kernels.device_matrix import HAS_FP8
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kv_cache.buffer import KVCache, KVMemory, measure_num_blocks
from longshore.worker.kv_cache.context_share import check_context_parallel
from longshore.worker.kv_cache.fp8 import KVScales
from longshore.worker.kv_cache.kv_scales import read_kv_scales
from longshore.worker.kv_cache.memory_budget import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    MemoryBudget,
    StepMemory,
    no_memory_for_steps,
    no_memory_for_warm_up,
)
from longshore.worker.kv_cache.plan import (
    CacheSizes,
    check_cache_specs,
    element_bytes,
    groups_of_rank,
    plan_groups,
)
from longshore.worker.kv_cache.report import report_on
from longshore.worker.layers.placement import Placement
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.loading.host_weights import HostWeights
from longshore.worker.loading.loadable_model import LoadableModel
from longshore.worker.loading.loader import (
    check_weights,
    fill_at_random,
    load_weights,
    weight_bytes,
)
from longshore.worker.loading.quantised_tensor import FP8_DTYPE
from longshore.worker.loading.stored_weights import StoredWeights
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.decoder_model import DecoderModel
from longshore.worker.models.families import read_model_config
from longshore.worker.models.registry import MODELS
from longshore.worker.models.rope_config import DynamicRope, rotation_of
from longshore.worker.process.byte_size import byte_size
from longshore.worker.process.device import (
    check_memory,
    dtype_name,
    fits_in_memory,
    open_device,
    release_unused_memory,
    resolve_dtype,
    wait_for_device,
)
from longshore.worker.process.memory_meter import MemoryMeter, memory_meter
from longshore.worker.queues.compute_queue import ComputeQueue, open_compute_queue
from longshore.worker.queues.transfer_queues import WorkerQueues
from longshore.worker.ranks.parallel import ALONE, Parallel
from longshore.worker.step.expert_capture import ExpertCapture, shape_of_experts
from longshore.worker.step.model_runner import ModelRunner
from longshore.worker.transfer.connector import ConnectorRunner, HookFailed
from longshore.worker.transfer.encoder import EncoderRunner

logger = logging.getLogger(__name__)

CPU_WARM_UP_TOKENS: Final = 32
CPU_WARM_UP_DECODES: Final = 4


class Worker:
    """One rank's weights on a device. Closing it ends its thread; it is a context manager.

    heads:     its KV heads.
    routed_experts: what it captures of each token's experts; None: nothing.
    kv_scales: scales of its layers, if the KV cache is fp8.
    connector, encoder_connector: hooks of the connectors' worker halves, after `start` with one.
    """

    def __init__(
        self,
        config: WorkerConfig,
        parallel: Parallel = ALONE,
        *,
        meter_of: Callable[[torch.device], MemoryMeter | None] = memory_meter,
    ) -> None:
        """Load this rank's part of the model. Raises ConfigError (UnsupportedModel,
        BrokenCheckpoint and KVCacheTooSmall among them) if it cannot be served.

        meter_of: the meter of a device, for tests.
        """
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        native.select(use_native=config.cpu_kernels == "auto")
        self._config = config
        self._parallel = parallel
        self._device = open_device(config.device)
        selector.select(config.attention_backend, self._device)
        self._meter = meter_of(self._device)
        self._drafts = config.drafts
        self._make_drafter: Callable[[], Drafter] | None = None
        if self._drafts is not None and not self._drafts.keeps_kv:
            self._make_drafter = partial(load_drafter(self._drafts), self._drafts)
        self._budget: MemoryBudget | None = None  # None: the cache is not sized by a profile
        model_dir = Path(config.model)
        model_config = read_model_config(model_dir)
        self.model_config = model_config
        self._dtype = resolve_dtype(config.dtype, model_config.dtype)
        sizes = CacheSizes(
            block_size=config.block_size,
            dtype_bytes=element_bytes(config.kv_cache_dtype, self._dtype.itemsize),
            num_shards=parallel.num_shards,
        )
        self._cache_specs = model_config.cache_specs(sizes)
        self._draft_layers = find_draft_layers(self._drafts, model_dir, model_config)
        if self._draft_layers is not None:
            self._cache_specs |= self._draft_layers.cache_specs(sizes)
        check_cache_specs(self._cache_specs, config.kv_cache_dtype)
        share = parallel.context_share
        check_context_parallel(
            self._cache_specs,
            size=share.size,
            interleave=share.interleave,
            block_size=config.block_size,
            num_shards=parallel.num_shards,
            num_kv_heads=model_config.num_kv_heads,
        )
        self.max_model_len = _max_model_len(config, model_config)
        weights = find_weights(model_dir) if config.load_format == "auto" else None
        products = _quantised_products(config, self._device, self._dtype, weights)
        build = self._build_of(model_config, products)
        # On `meta`, tensors have shapes and no memory.
        shapes = build(device=torch.device("meta"))
        self.routed_experts: RoutedExpertsShape | None = None
        if config.routed_experts_fd is not None:
            self.routed_experts = shape_of_experts(shapes.routers)
            check_longest(self.routed_experts, self.max_model_len)
        num_bytes = weight_bytes(shapes) if weights is None else check_weights(shapes, weights)
        check_memory("The model", num_bytes, self._device)
        with fits_in_memory("The model", self._device):
            self.model = build(device=self._device)
        self._fill(self.model, weights)
        self._network = self._make_network(weights)
        self.heads = model_config.head_share(parallel.shard, parallel.num_shards)
        self.kv_scales: dict[str, KVScales] = {}
        if config.kv_cache_dtype == FP8_E4M3:
            layers = [layer.name for layer in self._cached_layers]
            self.kv_scales = {} if weights is None else read_kv_scales(weights, layers)
        self._weight_bytes = num_bytes
        if self._network is not None:
            self._weight_bytes += weight_bytes(self._network.weights)
        self.connector: ConnectorRunner | None = None
        self.encoder_connector: EncoderRunner | None = None
        self._cache: KVCache | None = None
        self._queue: ComputeQueue | None = None
        self._runner: ModelRunner | None = None
        self._asleep: HostWeights | None = None

    def start(
        self,
        *,
        epoch: int = 1,
        num_blocks: int | None = None,
        memory: KVMemory | None = None,
        queue: ComputeQueue | None = None,
        connector: WorkerConnector[Any] | None = None,
        encoder_connector: EncoderWorker[Any] | None = None,
        wake: Callable[[], None] = lambda: None,
        transfer_delay: Callable[[], None] | None = None,
    ) -> ModelRunner:
        """Allocate the KV cache, warm up, and return the model runner. Called once, and again after
        `end_epoch`: with as many blocks, cache and runner are those of before. After `sleep`, all
        of it is done anew, with the same weights.

        All ranks warm up together. Raises RankLost if another rank fails to.

        num_blocks: agreed with the other ranks; None takes `kv_cache.num_blocks`.
        memory:     of the KV cache; None: the device's, or that of this process.
        queue:      compute queue to use; None opens the device's default. The worker closes it.
        connector, encoder_connector: worker halves of the connectors; the worker shuts them down.
        wake:       called on any thread when a connector has ended transfers to report.
        transfer_delay: called before each transfer on a host thread; for tests.
        """
        assert self.connector is None, "started already"
        self._wake_weights()
        agreed = self.kv_cache
        if num_blocks is not None:
            agreed = self._cache_of(agreed.groups, num_blocks)
        if self._cache is None or self._cache.num_blocks != agreed.num_blocks:
            self._free_cache()
            with fits_in_memory(f"A KV cache of {agreed.num_blocks} blocks", self._device):
                self._cache = self.make_cache(agreed, memory)
        cache = self._cache
        if self._queue is None:
            self._queue = queue or self._open_queue()
        if connector is not None:
            self.connector = ConnectorRunner(
                connector,
                WorkerQueues(self._device, self._queue, wake, transfer_delay),
                num_rows=self._config.max_num_seqs,
                epoch=epoch,
                rank=self._parallel.rank,
            )
            self.connector.register(cache)
        if encoder_connector is not None:
            self.encoder_connector = EncoderRunner(
                encoder_connector, epoch=epoch, rank=self._parallel.rank, wake=wake
            )
        if self._runner is not None:
            cache.recorded[:] = 0
            self._runner.begin_epoch(epoch, self.connector, self.encoder_connector)
            return self._runner
        experts = self._make_capture(cache)
        runner = self._runner = self._make_runner(cache, self._queue, epoch, experts)
        wait_for_device(self._device)  # the queue's stream does not wait for the default stream
        self._warm_up(runner)
        if self._budget is not None and self._meter is not None:
            # Steps of different sizes would leave pieces of memory that none of the next can use.
            self._meter.limit(self._budget.step_bytes(self._meter.used_bytes()))
        if memory is not None and memory.adopted_block_ids is not None:
            logger.info("%d blocks are adopted", len(memory.adopted_block_ids))
            runner.verify_adopted(memory.adopted_block_ids)
        logger.debug(
            "KV cache: %d blocks of %d bytes, %s of %s on %s",
            cache.num_blocks,
            cache.block_size_bytes,
            byte_size(cache.num_blocks * cache.block_size_bytes),
            agreed.dtype,
            self._device,
        )
        self._log_plan(agreed)
        return runner

    def _build_of(
        self,
        model_config: DecoderConfig,
        products: QuantisedProducts | None,
    ) -> Callable[..., DecoderModel]:
        """Builds a model on a device."""
        return partial(
            MODELS[type(model_config)],
            model_config,
            max_model_len=self.max_model_len,
            dtype=self._dtype,
            parallel=self._parallel,
            products=products,
        )

    def _fill(self, model: LoadableModel, weights: StoredWeights | None) -> None:
        if weights is None:
            fill_at_random(model)
        else:
            load_weights(model, weights, show_progress=self._config.show_progress)

    def _make_network(self, weights: StoredWeights | None) -> DraftNetwork | None:
        """The drafter, if it has weights. weights: of the model."""
        layers = self._draft_layers
        if layers is None:
            return None
        if layers.model_dir != Path(self._config.model) and weights is not None:
            weights = find_weights(layers.model_dir)
        products = _quantised_products(
            self._config, self._device, self._dtype, weights, is_required=False
        )
        placement = Placement(self._dtype, self._device, self._parallel, products)
        network: DraftNetwork
        with fits_in_memory("The drafter", self._device):
            if isinstance(layers.config, EagleConfig):
                network = EagleDrafter(
                    self.model,
                    layers.config,
                    placement,
                    weights,
                    max_tokens=self._max_step_tokens,
                )
            elif layers.method == MTP:
                network = MtpDrafter(self.model, placement)
            else:
                model = self._build_of(layers.config, products)(device=self._device)
                network = DraftModel(model, self.model_config.vocab_size)
        self._fill(network.weights, weights)
        return network

    def _open_queue(self) -> ComputeQueue:
        return open_compute_queue(self._device, partial(self._parallel.check, self._device))

    def _make_runner(
        self,
        cache: KVCache,
        queue: ComputeQueue,
        epoch: int,
        experts: ExpertCapture | None = None,
    ) -> ModelRunner:
        return ModelRunner(
            self.model,
            cache,
            GroupedAttention(cache, self.model.cached_layers(), self._parallel),
            queue,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            epoch=epoch,
            parallel=self._parallel,
            eos_token_ids=self._config.eos_token_ids,
            connector=self.connector,
            encoder_connector=self.encoder_connector,
            guards_blocks=self._config.poison_kv,
            enforce_eager=self._config.enforce_eager,
            experts=experts,
            num_drafts=0 if self._drafts is None else self._drafts.num_drafts,
            make_drafter=self._make_drafter,
            network=self._network,
        )

    def _make_capture(self, cache: KVCache) -> ExpertCapture | None:
        fd, shape = self._config.routed_experts_fd, self.routed_experts
        if fd is None or shape is None:
            return None
        kv_cache = self._cache_of(cache.groups, cache.num_blocks)
        lines = map_slots(fd, shape, kv_cache)
        logger.info(
            "the experts of each token are captured: %d layers, %d of %d experts; they take up to "
            "%s of host memory",
            shape.num_layers,
            shape.top_k,
            shape.num_experts,
            byte_size(lines.nbytes),
        )
        return ExpertCapture(
            self.model.routers,
            shape,
            lines,
            group=group_with_experts(cache.groups),
            max_num_batched_tokens=self._max_step_tokens,
        )

    @property
    def _cached_layers(self) -> tuple[CachedLayer, ...]:
        """Of the model and its drafter."""
        drafter = () if self._network is None else self._network.cached_layers()
        return (*self.model.cached_layers(), *drafter)

    @cached_property
    def kv_cache(self) -> KVCacheConfig:
        """What this rank can allocate, measured at the first call; `start` may take fewer blocks.
        Raises KVCacheTooSmall."""
        return self._plan_cache()

    @property
    def connectors(self) -> tuple[ConnectorRunner | EncoderRunner, ...]:
        """The connector and the encoder connector, without those that are missing."""
        both = self.connector, self.encoder_connector
        return tuple(each for each in both if each is not None)

    def encoder_config(self, fields: Mapping[str, Any]) -> EncoderWorkerConfig:
        """Config of an encoder connector's worker half. fields: of EncoderConnectorConfig."""
        return EncoderWorkerConfig(
            **fields,
            rank=self._parallel.rank,
            max_tokens=self.model_config.max_encoder_tokens,
            hidden_size=self.model_config.hidden_size,
            dtype=self._dtype,
            device=self._device,
        )

    @property
    def features(self) -> tuple[Feature, ...]:
        """What this worker supports in addition to text generation."""
        drafts = (Feature.DRAFTS,) if self._drafts is not None else ()
        if self.model_config.max_encoder_tokens:
            return (Feature.MULTIMODAL, *drafts)
        features = [Feature.POOLING, *drafts]
        features.append(
            Feature.STRUCTURED_OUTPUT if self.model_config.has_head else Feature.POOLING_ONLY
        )
        if self.model_config.labels:
            features.append(Feature.CLASSIFY)
        if self.model_config.is_bidirectional:
            features.append(Feature.BIDIRECTIONAL)
        return tuple(features)

    def make_cache(self, config: KVCacheConfig, memory: KVMemory | None = None) -> KVCache:
        """A KV cache for this rank's layers, in the model's dtype and on its device."""
        return KVCache(
            config,
            dtype=self._dtype,
            device=self._device,
            scales=self.kv_scales,
            poison=self._config.poison_kv,
            memory=memory,
        )

    def end_epoch(self) -> None:
        """Finish what was submitted, and end all transfers. `start` may follow, without loading or
        warming up again. May be called twice. Raises HookFailed if the connector could not end its
        transfers: blocks may still be read or written, so they must not be used again, and only a
        new process recovers from it."""
        if self._runner is not None:
            self._runner.finish()
        if self.connector is not None:
            self.connector.close()
            self.connector = None
        if self.encoder_connector is not None:
            self.encoder_connector.close()
            self.encoder_connector = None

    def sleep(self) -> None:
        """End the epoch and free the memory of the device, until `start`: the KV cache, buffers and
        graphs, and on a GPU also the weights, which wait in host memory. May be called twice.
        Raises HookFailed as `end_epoch` does; then nothing is freed."""
        self.end_epoch()
        self._free_cache()
        gc.collect()  # what is on the device goes with the last reference to it
        if self._asleep is None and leave_device(self._device):
            with fits_in_memory("A copy of the weights in host memory", torch.device("cpu")):
                self._asleep = HostWeights((self.model, self._network), self._device)
        release_unused_memory(self._device)

    def _wake_weights(self) -> None:
        if self._asleep is not None:
            with fits_in_memory("The model", self._device):
                self._asleep.restore()
            self._asleep = None

    def _free_cache(self) -> None:
        if self._runner is not None:
            self._runner.finish()
        self._runner = self._cache = None
        self._end_limit()

    def _end_limit(self) -> None:
        if self._budget is not None and self._meter is not None:
            self._meter.limit(None)

    def close(self) -> None:
        """End the epoch and all threads, and free the KV cache, unless a transfer may still write
        to it. The weights stay, so that `start` may follow. May be called twice."""
        with contextlib.suppress(HookFailed):  # it has been logged
            self.end_epoch()
            self._cache = None
        if self._queue is not None:
            self._queue.close()
        self._runner = self._queue = None
        self._end_limit()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _longest_request(self) -> LongestRequest:
        """The longest request, with what may be in flight of it: this bounds its blocks."""
        config = self._config
        num_steps = config.max_steps_in_flight
        if num_steps is None:
            num_steps = max(self._parallel.num_stages, DEFAULT_STEPS_IN_FLIGHT)
        step_tokens = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        return LongestRequest(
            self.max_model_len,
            num_steps * step_tokens + self._num_lookahead_tokens,
            num_steps,
            self._parallel.context_share.size,
        )

    @property
    def _max_step_tokens(self) -> int:
        """Tokens of a step, with those that are computed once more."""
        config, layers = self._config, self._draft_layers
        num_primers = config.max_num_seqs if layers is not None and layers.reads_hidden else 0
        return config.max_num_batched_tokens + num_primers

    @property
    def _num_lookahead_tokens(self) -> int:
        """See SchedulerConfig."""
        return 0 if self._draft_layers is None or self._drafts is None else self._drafts.num_drafts

    def _plan_cache(self) -> KVCacheConfig:
        config = self._config
        # Planned for the whole model, so that all stages have the same groups.
        groups = groups_of_rank(
            plan_groups(
                self._cache_specs,
                max_model_len=self.max_model_len,
                max_num_batched_tokens=config.max_num_batched_tokens,
            ),
            {layer.name for layer in self._cached_layers},
        )
        if self.routed_experts is not None:
            group_with_experts(groups)
        longest = max_blocks(groups, self._longest_request)
        if config.num_blocks is not None:
            num_blocks = config.num_blocks
        elif self._meter is not None and not (config.kv_cache_bytes or config.kv_memory_fraction):
            num_blocks = self._num_blocks_beside_steps(groups, self._meter)
        else:
            num_blocks = measure_num_blocks(
                groups,
                device=self._device,
                kv_cache_bytes=config.kv_cache_bytes,
                memory_fraction=config.kv_memory_fraction,
                num_ranks_on_device=config.num_ranks_on_device,
                max_useful_blocks=config.max_num_seqs * longest + num_reserved_blocks(groups),
            )
        return self._cache_of(groups, num_blocks)

    def _num_blocks_beside_steps(self, groups: tuple[KVCacheGroup, ...], meter: MemoryMeter) -> int:
        """The blocks that fit into the device's memory beside the largest steps, which are computed
        for that. All ranks call it together. Raises ConfigError, KVCacheTooSmall among them."""
        config = self._config
        budget = self._budget = MemoryBudget(
            self._profile(groups, meter),
            config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION,
            self._weight_bytes,
            config.num_ranks_on_device,
        )
        num_blocks = budget.num_blocks(
            groups,
            self._longest_request,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        logger.info("memory of %s: %s", self._device, budget)
        return num_blocks

    def _profile(self, groups: tuple[KVCacheGroup, ...], meter: MemoryMeter) -> StepMemory:
        """Measure steps with a cache that has only the null block and those of sinks. They capture
        no experts, because the shared memory of these has a place for every block."""
        config = self._config
        smallest = self._config_of(groups, num_reserved_blocks(groups))
        self._wake_weights()
        if self._queue is None:
            self._queue = self._open_queue()
        try:
            with fits_in_memory("The smallest KV cache", self._device):
                runner = self._make_runner(self.make_cache(smallest), self._queue, epoch=0)
            wait_for_device(self._device)
            measured = runner.profile(meter)
            runner.finish()
            return measured
        except OutOfMemory as error:
            raise no_memory_for_steps(
                config, self._device, self._weight_bytes, self.max_model_len, error
            ) from error

    def _cache_of(self, groups: tuple[KVCacheGroup, ...], num_blocks: int) -> KVCacheConfig:
        """Raises KVCacheTooSmall."""
        check_holds_one_request(groups, num_blocks, self._longest_request)
        return self._config_of(groups, num_blocks)

    def _config_of(self, groups: tuple[KVCacheGroup, ...], num_blocks: int) -> KVCacheConfig:
        kept = self._config.kv_cache_dtype
        dtype = dtype_name(self._dtype) if kept == "auto" else kept
        return KVCacheConfig(
            num_blocks=num_blocks,
            groups=groups,
            dtype=dtype,
            rotation=rotation_of(self.model_config.rope, self.max_model_len),
        )

    def _log_plan(self, config: KVCacheConfig) -> None:
        report = report_on(config.groups, config.num_blocks, self._longest_request)
        for index, group in enumerate(report.groups):
            logger.debug(
                "group %d: %s, %d layers of %d bytes, %d tokens per block, %.1f %% padding",
                index,
                group.kind,
                group.num_layers,
                group.layer_bytes,
                group.block_tokens,
                100 * group.padding_bytes / report.block_bytes,
            )
        if report.expanded_bytes:
            logger.debug(
                "%s more will be allocated when keys and values are first expanded from latents",
                byte_size(report.expanded_bytes),
            )
        num_requests = f"{report.max_concurrency:,.2f}".removesuffix(".00")
        logger.debug("%s requests of %d tokens fit", num_requests, report.max_model_len)

    def _warm_up(self, runner: ModelRunner) -> None:
        config = self._config
        num_tokens = min(config.max_num_batched_tokens, self.max_model_len)
        num_decodes = min(config.max_num_batched_tokens, config.max_num_seqs)
        if self._device.type == "cpu":  # nothing to tune or reserve, only threads to start
            num_tokens = min(num_tokens, CPU_WARM_UP_TOKENS)
            num_decodes = min(num_decodes, CPU_WARM_UP_DECODES)
        try:
            runner.warm_up(num_tokens, num_decodes, show_progress=config.show_progress)
        except OutOfMemory as error:
            raise no_memory_for_warm_up(config, self._device, error) from error


def leave_device(device: torch.device) -> bool:
    """Whether weights leave the device while the worker sleeps: a CPU's are on the host already."""
    return device.type != "cpu"


def _quantised_products(
    config: WorkerConfig,
    device: torch.device,
    dtype: torch.dtype,
    weights: StoredWeights | None,
    *,
    is_required: bool = True,
) -> QuantisedProducts | None:
    """How quantised matrices are multiplied. Raises ConfigError if the settings want inputs to be
    rounded, and there are no such matrices or no kernels; not unless `is_required`."""
    products = config.quantised_products(device.type, dtype_name(dtype))
    if products is None:
        return None
    tensors = [] if weights is None else weights.tensors.values()
    kept = [(each.dtype, each.kept_bits.on_cpu) for each in tensors if each.kept_bits is not None]
    if device.type == "cuda":
        has_kernels = uses_triton(torch.empty(0, device=device))
    else:
        has_kernels = native.native() is not None
        kept = [(stored, on_cpu) for stored, on_cpu in kept if on_cpu is not None]
    if products == "fp8 on a GPU":
        has_kernels = has_kernels and torch.cuda.get_device_capability(device) >= HAS_FP8
        kept = [(stored, on_cpu) for stored, on_cpu in kept if stored == FP8_DTYPE]
    is_auto = config.quantised_weights == "auto"
    is_quantised = weights is not None and weights.method is not None
    if has_kernels and (is_quantised if is_auto else kept):
        return products
    if not is_auto and is_required:
        place = "GPU" if device.type == "cuda" else "CPU"
        what = f"there are no kernels of them for this {place}" if kept else "this model has none"
        raise ConfigError(
            f"quantised_weights={config.quantised_weights} is about the products of weights that "
            f"stay in a quantised format on a {place}, but {what}; leave it out"
        )
    return None


def _max_model_len(config: WorkerConfig, model_config: DecoderConfig) -> int:
    if config.max_model_len is None:
        return model_config.default_max_len
    longest = model_config.max_supported_len
    if config.max_model_len > longest:
        why = (
            "dynamic rope would rotate keys that are already cached by different angles"
            if isinstance(model_config.rope, DynamicRope)
            else "the model has no positions beyond that"
        )
        raise UnsupportedModel(
            f"max_model_len={config.max_model_len} is more than the {longest} tokens that "
            f"{config.model} supports: {why}. Lower max_model_len."
        )
    return config.max_model_len
