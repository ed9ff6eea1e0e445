"""What the larger parts of the scheduler share: its tables, and its configured features."""

from dataclasses import dataclass, fields
from typing import Any

from longshore.connectors.base import EncoderConnector, SchedulerConnector
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.features.drafts import Drafts
from longshore.scheduler.features.encoder import EncoderCache, make_encoder
from longshore.scheduler.features.forks import Forks
from longshore.scheduler.features.grammar import GrammarCompiler, Grammars
from longshore.scheduler.features.load_waits import LoadWaits
from longshore.scheduler.features.lora import LoRASlots
from longshore.scheduler.features.metrics import BlockMetrics
from longshore.scheduler.features.pins import Pins
from longshore.scheduler.features.routed_experts import RoutedExpertsReader
from longshore.scheduler.features.swap_cost import PrefillRate
from longshore.scheduler.features.tool_calls import Decoder
from longshore.scheduler.features.transfers import Transfers
from longshore.scheduler.inspect.trace import SchedulerTrace
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.queue.policies import ContinuumPolicy, FairPolicy, SchedulingPolicy
from longshore.scheduler.queue.queues import SharedEvent, WaitingRequests
from longshore.scheduler.queue.shares import Shares
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.running import RunningTable


@dataclass(slots=True, kw_only=True)
class SchedulerPart:
    """A part of one scheduler; all parts refer to the same objects.

    transfers, encoder, loras, grammars, drafts, shares, pins, experts, trace: None unless
    configured.
    prefill_rate: what computing costs, for decisions against other ways; measured if one of them
                  is configured, else None.
    """

    config: SchedulerConfig
    running: RunningTable
    waiting: WaitingRequests
    forks: Forks
    holds: Holds
    kv_cache: KVCacheManager
    in_flight: StepsInFlight
    plan: PlanBuilder
    transfers: Transfers | None
    encoder: EncoderCache | None
    loras: LoRASlots | None
    grammars: Grammars | None
    drafts: Drafts | None
    shares: Shares | None
    pins: Pins | None
    prefill_rate: PrefillRate | None
    experts: RoutedExpertsReader | None
    trace: SchedulerTrace | None

    def shared(self) -> dict[str, Any]:
        """The arguments with which other parts are made."""
        return {field.name: getattr(self, field.name) for field in fields(SchedulerPart)}


def make_shared(
    config: SchedulerConfig,
    cache: CacheConfig,
    kv_cache: KVCacheConfig,
    policy: SchedulingPolicy,
    *,
    hash_seed: bytes,
    vocab_size: int,
    epoch: int,
    verify_plan: bool,
    connector: SchedulerConnector | None,
    encoder_connector: EncoderConnector | None,
    grammars: GrammarCompiler | None,
    num_ranks: int,
    block_metrics: BlockMetrics | None,
    experts: RoutedExpertsReader | None,
    decode: Decoder | None,
    trace: SchedulerTrace | None,
) -> SchedulerPart:
    """The tables and features of one scheduler, empty; for the arguments see `Scheduler`."""
    blocks = KVCacheManager(
        cache,
        kv_cache,
        config.longest_request(cache.context_parallel_size),
        max_num_seqs=config.max_num_seqs,
        hash_seed=hash_seed,
        metrics=block_metrics,
        record_cached=connector is not None and config.kv_role != "kv_consumer",
    )
    shares = transfers = masks = drafts = pins = None
    if isinstance(policy, FairPolicy):
        num_slots = blocks.num_usable_blocks * cache.block_size
        shares = policy.shares = Shares(config.max_num_seqs, num_slots)
    polls = connector is not None and not connector.names_answers
    waiting = WaitingRequests(policy, polled=(SharedEvent.CONNECTOR,) if polls else ())
    running = RunningTable(config.max_num_seqs, config.max_model_len, config.num_speculative_tokens)
    in_flight = StepsInFlight(running)
    holds = Holds(blocks)
    rate = PrefillRate()
    if connector is not None:
        waits = LoadWaits(config, running, rate, connector.min_wait_s)
        may_load = config.kv_role != "kv_producer"
        transfers = Transfers(connector, blocks, waits, num_ranks=num_ranks, may_load=may_load)
    if isinstance(policy, ContinuumPolicy) and cache.enable_prefix_caching and config.max_pin_s:
        pins = Pins(
            *(policy, waiting, blocks, transfers, rate), max_ttl_s=config.max_pin_s, decode=decode
        )
    encoder = make_encoder(config, kv_cache, encoder_connector)
    if grammars is not None:
        masks = Grammars(
            grammars,
            in_flight,
            waiting,
            vocab_size=vocab_size,
            epoch=epoch,
            max_num_seqs=config.max_num_seqs,
            has_priorities=not policy.ignores_priority,
        )
    if config.num_speculative_tokens:
        drafts = Drafts(running, masks, is_async=config.max_steps_in_flight > 1)
    plan = PlanBuilder(
        running,
        blocks,
        epoch=epoch,
        encoder=encoder,
        encoder_connector=encoder_connector,
        drafts=drafts,
        transfers=transfers,
        feed_back_tokens=config.feed_back_tokens,
        has_grammars=masks is not None,
        verify_plan=verify_plan,
    )
    return SchedulerPart(
        config=config,
        running=running,
        waiting=waiting,
        forks=Forks(running, waiting, blocks, holds, in_flight),
        holds=holds,
        kv_cache=blocks,
        in_flight=in_flight,
        plan=plan,
        transfers=transfers,
        encoder=encoder,
        loras=LoRASlots(config.max_loras) if config.max_loras else None,
        grammars=masks,
        drafts=drafts,
        shares=shares,
        pins=pins,
        prefill_rate=rate if transfers is not None or pins is not None else None,
        experts=experts,
        trace=trace,
    )
