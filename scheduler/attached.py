"""All features of a scheduler, and the one order in which their hooks are called."""

from dataclasses import dataclass, field
from typing import Any

from longshore.connectors.base import EncoderConnector, SchedulerConnector
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.features.answer_states import AnswerStates
from longshore.scheduler.features.drafts import Drafts
from longshore.scheduler.features.encoder import EncoderCache, make_encoder
from longshore.scheduler.features.encoder_inputs import EncoderInputs
from longshore.scheduler.features.fair_shares import FairShares
from longshore.scheduler.features.fork_states import ForkStates
from longshore.scheduler.features.forks import Forks
from longshore.scheduler.features.grammar import GrammarCompiler, Grammars
from longshore.scheduler.features.kept_states import PromptStates
from longshore.scheduler.features.load_waits import LoadWaits
from longshore.scheduler.features.loads import Loads
from longshore.scheduler.features.lora import LoRASlots
from longshore.scheduler.features.pins import Pins
from longshore.scheduler.features.recovery import Recovery
from longshore.scheduler.features.routed_experts import RoutedExpertsHooks, RoutedExpertsReader
from longshore.scheduler.features.sessions import Sessions
from longshore.scheduler.features.swap import Swaps
from longshore.scheduler.features.swap_cost import PrefillMeter, PrefillRate
from longshore.scheduler.features.tool_calls import Decoder
from longshore.scheduler.features.transfers import Transfers
from longshore.scheduler.features.turns import Turns
from longshore.scheduler.hooks import Hooks, SchedulerFeature
from longshore.scheduler.inspect.trace import SchedulerTrace, Traced
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.queue.policies import ContinuumPolicy, FairPolicy, SchedulingPolicy
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.step.admission import AdmissionGates
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.running import RunningTable
from longshore.scheduler.step.token_budget import TokenBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFeatures:
    """What a scheduler was given for its features; see `Scheduler`."""

    cache: CacheConfig
    kv_cache: KVCacheConfig
    vocab_size: int
    connector: SchedulerConnector | None
    encoder_connector: EncoderConnector | None
    grammars: GrammarCompiler | None
    num_ranks: int
    experts: RoutedExpertsReader | None
    decode: Decoder | None
    trace: SchedulerTrace | None


@dataclass(slots=True, kw_only=True)
class AttachedFeatures:
    """The features of one scheduler; those that are not configured are None.

    prefill_rate: what computing costs; measured if a feature compares it with another way.
    """

    config: SchedulerConfig
    running: RunningTable
    waiting: WaitingRequests
    holds: Holds
    kv_cache: KVCacheManager
    in_flight: StepsInFlight
    plan: PlanBuilder
    hooks: Hooks
    policy: SchedulingPolicy
    gates: AdmissionGates
    budget: TokenBudget
    lifecycle: Lifecycle
    forks: Forks = field(init=False)
    sessions: Sessions = field(init=False)
    recovery: Recovery = field(init=False)
    prefill_rate: PrefillRate = field(default_factory=PrefillRate)
    transfers: Transfers | None = None
    loads: Loads | None = None
    encoder: EncoderCache | None = None
    loras: LoRASlots | None = None
    grammars: Grammars | None = None
    drafts: Drafts | None = None
    pins: Pins | None = None
    swaps: Swaps | None = None
    experts: RoutedExpertsHooks | None = None

    def attach(self, given: GivenFeatures) -> None:
        """Make the features and attach them. Each hook is called in this order:

        - forks before grammars, because a fork is parked until its parent has computed;
        - what ends or parks requests before pins, which announce what is left of them, and pins
          before transfers, because blocks that the connector holds are no longer the request's own;
        - states of answers before loads, which may find less of a prompt in the connector, and
          before those of prompts, which say what becomes of them;
        - states of prompts before those of forks, which share them, and before transfers, because
          the connector gets those of this plan;
        - experts before sessions, because a session releases blocks;
        - the encoder before swaps, because a victim releases items of this step, and swaps before
          shares, which count the rows that are left;
        - the trace last: it records what the others have done.
        """
        self._make(given)
        rows = (self.running, self.waiting)
        encoder = shares = meter = states = answers = fork_states = None
        if self.encoder is not None:
            encoder = EncoderInputs(self.encoder, *rows, self.plan, given.encoder_connector)
        if given.experts is not None:
            self.experts = RoutedExpertsHooks(given.experts, self.in_flight)
        if isinstance(self.policy, FairPolicy):
            shares = FairShares(self.policy.shares, *rows, self.budget)
        if (kept := self.kv_cache.kept_states) is not None:
            ends = self.kv_cache.ends
            turns = Turns(kept.chains, ends, kept.tokens_per_hash)
            if ends is not None:
                answers = AnswerStates(ends, turns, self.holds, self.in_flight)
            states = PromptStates(self.running, self.kv_cache, self.in_flight, turns, answers)
        if self.kv_cache.has_states and self.kv_cache.can_fork:
            fork_states = self.forks.states = ForkStates(self.forks, self.running, self.kv_cache)
        if self.transfers is not None or self.pins is not None:
            meter = PrefillMeter(self.prefill_rate)
        order: tuple[SchedulerFeature | None, ...] = (
            self.recovery,
            self.forks,
            self.experts,
            self.sessions,
            self.grammars,
            self.loras,
            encoder,
            answers,
            self.loads,
            self.pins,
            states,
            fork_states,
            self.transfers,
            self.drafts,
            self.swaps,
            shares,
            meter,
            given.trace,
        )
        self.hooks.attach(*order, asleep=(self.forks, self.sessions))
        if given.trace is not None:
            self.sessions.observers.append(given.trace)
            given.trace.start(
                Traced(
                    config=self.config,
                    running=self.running,
                    waiting=self.waiting,
                    kv_cache=self.kv_cache,
                    in_flight=self.in_flight,
                    plan=self.plan,
                    budget=self.budget,
                    pins=self.pins,
                    loads=self.loads,
                    connector=given.connector,
                )
            )

    def _make(self, given: GivenFeatures) -> None:
        config, running, waiting = self.config, self.running, self.waiting
        lifecycle, blocks, in_flight = self.lifecycle, self.kv_cache, self.in_flight
        tables: dict[str, Any] = dict(config=config, kv_cache=blocks, in_flight=in_flight)
        tables |= dict(lifecycle=lifecycle)
        self.recovery = Recovery(
            **tables,
            hooks=self.hooks,
            running=running,
            holds=self.holds,
            plan=self.plan,
            budget=self.budget,
        )
        self.forks = Forks(running, waiting, blocks, self.holds, in_flight, lifecycle.get)
        self.sessions = Sessions(
            **tables,
            waiting=waiting,
            holds=self.holds,
            validator=lifecycle.validator,
            outputs=lifecycle.outputs,
            eos_token_ids=lifecycle.eos_token_ids,
        )
        if (connector := given.connector) is not None:
            self.transfers = Transfers(
                connector,
                blocks,
                LoadWaits(config, running, self.prefill_rate, connector.min_wait_s),
                num_ranks=given.num_ranks,
                may_load=config.kv_role != "kv_producer",
            )
            self.loads = Loads(
                **tables,
                waiting=waiting,
                holds=self.holds,
                plan=self.plan,
                forks=self.forks,
                transfers=self.transfers,
            )
            if config.preemption_mode != "recompute":
                self.swaps = Swaps(
                    **tables,
                    running=running,
                    transfers=self.transfers,
                    prefill_rate=self.prefill_rate,
                    policy=self.policy,
                    gates=self.gates,
                )
        policy = self.policy
        can_pin = given.cache.enable_prefix_caching and config.max_pin_s > 0
        if isinstance(policy, ContinuumPolicy) and can_pin:
            self.pins = Pins(
                *(policy, waiting, blocks, self.transfers, self.prefill_rate),
                max_ttl_s=config.max_pin_s,
                decode=given.decode,
            )
        self.encoder = make_encoder(config, given.kv_cache, given.encoder_connector)
        if given.grammars is not None:
            self.grammars = Grammars(
                given.grammars,
                running,
                in_flight,
                waiting,
                lifecycle,
                vocab_size=given.vocab_size,
                epoch=self.plan.epoch,
                max_num_seqs=config.max_num_seqs,
                has_priorities=not policy.ignores_priority,
            )
        if config.num_speculative_tokens:
            # A row of which a stage needs the tokens is in one step at a time.
            is_async = config.max_steps_in_flight > 1 and not config.feed_back_tokens
            self.drafts = Drafts(running, self.grammars, is_async=is_async)
        if config.max_loras:
            self.loras = LoRASlots(config.max_loras, waiting)
