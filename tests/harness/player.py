"""Plays one engine with every feature in it, at random: clients, workers, ranks and a connector do
all that their contracts allow, at the worst moments."""

import random
import zlib
from typing import Any, ClassVar, Final

from longshore.protocol.kv_cache_spec import KVCacheSpec, StateSpec
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import NO_TENANT, CacheHint, Tenant
from longshore.scheduler.request import HoldKind
from longshore.scheduler.step.planner import PauseState
from tests.harness.block_checks import has_unanswered_blocks, held_by_pins
from tests.harness.clients import RequestKey
from tests.harness.connector import Mischief
from tests.harness.grammar import FakeCompiler, grammar_for
from tests.harness.kv_groups import chunked, full, state, window
from tests.harness.random_requests import RandomRequests, random_kinds
from tests.harness.shared_drivers import connected
from tests.harness.tokens import steady_token
from tests.harness.transfers import Load

LOAD_TIMEOUT_S: Final = 30.0
WRONG_DRAFT: Final = 4
"""No request samples it, and no grammar allows it."""

CHECKED_BY_DRIVER: Final = frozenset(
    {"step", "plan", "execute", "answer", "write", "end_load", "end_send", "repeat", "lie"}
)
"""Actions that are plans, outputs and reports, after each of which the driver checks all blocks, or
that do not concern the scheduler."""

GROUPS: Final[dict[str, list[KVCacheSpec]]] = {
    "full": [full()],
    "two": [full(), full()],
    "window": [full(), window(6)],
    "large window": [window(9), full(8)],
    "chunked": [chunked(8), full()],
    "state": [full(), state()],
    "states alone": [state(2)],
}


def drafts_for(num_drafts: int) -> Any:
    """Right for a while, which depends on the request and the position, then wrong."""

    def draft(request_id: str, position: int) -> list[int]:
        num_right = zlib.crc32(f"{request_id}?{position}".encode()) % (num_drafts + 2)
        right = [steady_token(request_id, position + index) for index in range(num_drafts)]
        return [*right[:num_right], *[WRONG_DRAFT] * num_drafts][:num_drafts]

    return draft


class Player:
    """All it draws comes from `chance`, so a seed is a whole run.

    sessions: keys of requests that may get more input.
    said:     (rank, kind, request id) of reports that were true.
    num_resets: of the prefix cache while requests ran, which were preempted.
    num_pauses, num_waits: changes of what is scheduled, and times at which all loads were late.
    """

    MODES: tuple[str, ...] = ("recompute", "recompute", "recompute", "swap")
    POLICIES: tuple[str, ...] = ("fcfs", "priority")
    MODELS: tuple[str, ...] = (*["full"] * 4, "two", "window", "large window", "chunked")
    ACTIONS: ClassVar[dict[str, float]] = {
        "add": 8,
        "step": 20,
        "plan": 10,
        "execute": 8,
        "answer": 8,
        "end_load": 14,
        "write": 5,
        "end_send": 5,
        "end_store": 5,
        "end_swap": 5,
        "repeat": 3,
        "lie": 3,
        "abort": 3,
        "stop": 2,
        "go_on": 2,
        "compile": 2,
        "pause": 1,
        "wait": 1.5,
        "reset": 2,
        "die": 1,
    }

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.may_fail = chance.random() < 0.75
        self.sessions: set[RequestKey] = set()
        self.said: list[tuple[int, str, str]] = []
        self.num_resets = self.num_pauses = self.num_waits = 0
        self.compiler = FakeCompiler()
        kinds = random_kinds(chance)
        caches = chance.random() < 0.8
        groups = GROUPS[chance.choice(self.MODELS)]
        num_drafts = chance.choice([0, 1, 3])
        has_states = any(isinstance(spec, StateSpec) for spec in groups)
        if has_states:  # they cannot be rewound
            num_drafts = 0
        # Swapping begins early, and so often, in runs that do it.
        mode = chance.choice(self.MODES)
        swaps = mode != "recompute"
        threshold = chance.choice([0.4, 0.5] if swaps else [1.0, 0.8])
        self.driver = connected(
            *groups,
            num_blocks=len(groups) * chance.randrange(14, 32) + 16 * (len(groups) - 1) + 8 * swaps,
            num_ranks=chance.choice([1, 1, 2, 3]),
            rules=self._make_rules(is_exact=has_states),
            cache={
                "enable_prefix_caching": caches,
                "hash_block_size": 4,
                "watermark": chance.choice([0.0, 0.1]),
                "preempt_threshold": threshold,
                "admit_threshold": min(threshold, 0.6),
            },
            fail_sync=self._failing,
            grammars=self.compiler,
            draft=drafts_for(num_drafts),
            num_speculative_tokens=num_drafts,
            num_lookahead_tokens=chance.choice([0, 0, num_drafts]),
            max_loras=chance.choice([1, 2]),
            max_num_encoder_input_tokens=8,
            encoder_cache_size=chance.choice([None, 8, 12]),
            max_model_len=40,
            max_num_seqs=chance.randrange(1, 6) + 2 * swaps,
            max_num_batched_tokens=chance.choice([7, 16, 40, 100]),
            max_steps_in_flight=chance.choice([1, 2]),
            max_loading_blocks=chance.choice([None, 3, 100]),
            scheduler_reserve_full_isl=chance.random() < 0.3,
            policy=chance.choice(self.POLICIES),
            preemption_mode=mode,
            load_failure_policy=chance.choice(["recompute", "recompute", "fail"]),
            load_timeout_s=LOAD_TIMEOUT_S,
        )
        self._requests = RandomRequests(chance, self.driver, kinds)

    def _make_rules(self, *, is_exact: bool) -> dict[str, Any]:
        chance = self.chance
        return Mischief(
            match=chance.random(),
            background=chance.random(),
            delay_free=chance.choice([0.0, 0.4]),
            store=chance.choice([0.0, 0.4]),
            swap=chance.choice([0.5, 1.0]),
            restore=chance.choice([0.5, 1.0]),
            is_exact=is_exact,
        ).rules(chance)

    def act(self, action: str) -> None:
        """Do it, if it can be done. Afterwards every block and count is accounted for."""
        getattr(self, f"_{action}")()
        if action not in CHECKED_BY_DRIVER:
            self.driver.scheduler.check()

    def act_randomly(self) -> None:
        names, weights = list(self.ACTIONS), list(self.ACTIONS.values())
        self.act(self.chance.choices(names, weights)[0])

    # Clients

    def _add(self) -> None:
        kind, request_id, prompt, fields = self._draw()
        key = self.driver.add(request_id, prompt, **fields)
        if kind == "session":
            self.sessions.add(key)

    def _draw(self) -> tuple[str, str, list[int], dict[str, Any]]:
        return self._requests.draw()

    def _any_request(self) -> RequestKey | None:
        return self.chance.choice(list(self.driver.names)) if self.driver.names else None

    def _abort(self) -> None:
        if key := self._any_request():
            self.driver.abort(key)

    def _stop(self) -> None:
        if key := self._any_request():
            self.driver.stop_found(key, self.chance.randrange(4))

    def _go_on(self) -> None:
        """More input for a session, sometimes the last."""
        if live := sorted(self.sessions - set(self.driver.finished)):
            key = self.chance.choice(live)
            is_last = self.chance.random() < 0.3
            prompt = [60, 61, 62][: self.chance.randrange(4)]
            self.driver.continue_session(key, prompt, max_tokens=3, resumable=not is_last)
            if is_last:
                self.sessions.discard(key)

    def _compile(self) -> None:
        if key := self._any_request():
            self.compiler.ready.add(self.driver.names[key])

    def _lose(self) -> None:
        """The grammar of a running request is lost, or one that was lost is compiled again."""
        requests = self.driver.scheduler.running.requests_in_order()
        running = [
            each.options.structured_output.text
            for each in requests
            if each.options.structured_output
        ]
        if names := sorted(self.compiler.lost) + running:
            self.compiler.lost ^= {self.chance.choice(names)}

    def _pause(self) -> None:
        self.driver.scheduler.set_pause(self.chance.choice(list(PauseState)))
        self.num_pauses += 1

    def _wait(self) -> None:
        self.driver.now += LOAD_TIMEOUT_S
        self.num_waits += 1

    def _reset(self) -> None:
        driver = self.driver
        resets_running = self.chance.random() < 0.3
        references = driver.scheduler.kv_cache.pool.references()
        can_reset = int(references.sum()) == sum(held_by_pins(driver.scheduler).values())
        if resets_running:
            is_storing = has_unanswered_blocks(driver.scheduler)
            can_reset = driver.transfers.is_idle and not is_storing
        before = driver.running
        was_reset = driver.scheduler.reset_prefix_cache(
            driver.now, reset_running_requests=resets_running
        )
        assert was_reset == can_reset
        assert driver.running == ([] if resets_running and was_reset else before)
        self.num_resets += resets_running and was_reset and bool(before)

    # Workers

    def _step(self) -> None:
        self.driver.step()

    def _plan(self) -> None:
        nan_ids: set[str] = set()
        if self.may_fail and self.chance.random() < 0.1:
            nan_ids = set(self.chance.choices([*self.driver.workers.request_ids.values(), ""]))
        self.driver.plan(nan_ids=nan_ids)

    def _execute(self) -> None:
        if self.driver.workers.received:
            self.driver.execute()

    def _answer(self) -> None:
        if self.driver.unanswered:
            self.driver.answer()

    def _die(self) -> None:
        self.driver.restart_workers(late_outputs=True, keeps_kv=self.chance.random() < 0.5)
        self.said.clear()

    # Transfers

    def _failing(self, load: Load) -> list[int]:
        if not self.may_fail or self.chance.random() < 0.5:
            return []
        return [block_id for block_id in sorted(load.targets) if self.chance.random() < 0.5]

    def _pending(self, kind: str) -> tuple[str, int] | None:
        transfers = self.driver.transfers
        pending = [
            (request_id, rank)
            for request_id in (transfers.loading if kind == "load" else transfers.sending)
            for rank in transfers.ranks_left(kind, request_id)
        ]
        return self.chance.choice(pending) if pending else None

    def _write(self) -> None:
        if pending := self._pending("load"):
            load = self.driver.transfers.loading[pending[0]]
            self.driver.ranks.write(*pending, failing=self._failing(load))

    def _end_load(self) -> None:
        if pending := self._pending("load"):
            load = self.driver.transfers.loading[pending[0]]
            self.driver.ranks.end_load(*pending, failing=self._failing(load))
            self.said.append((pending[1], "load", pending[0]))

    def _end_send(self) -> None:
        if pending := self._pending("send"):
            self.driver.ranks.end_send(*pending)
            self.said.append((pending[1], "send", pending[0]))

    def _end_store(self) -> None:
        if self.driver.ranks.stores:
            self.driver.ranks.end_store(self.chance.choice(self.driver.ranks.stores))

    def _end_swap(self) -> None:
        if self.driver.ranks.swaps:
            self.driver.ranks.end_swap(self.chance.choice(self.driver.ranks.swaps))

    def _repeat(self) -> None:
        """A rank repeats a report, unless another transfer of that request id is in progress."""
        if not self.said:
            return
        rank, kind, request_id = self.chance.choice(self.said)
        transfers = self.driver.transfers
        live = transfers.loading if kind == "load" else transfers.sending
        if request_id in live and rank in transfers.ranks_left(kind, request_id):
            return
        ids = [request_id]
        self.driver.ranks.report(rank, **{"receiving" if kind == "load" else "sending": ids})

    def _lie(self) -> None:
        """Reports about nothing: of other ranks, other epochs, other requests."""
        driver, chance = self.driver, self.chance
        request_id = chance.choice([*driver.names.values(), "unknown"])
        match chance.randrange(4):
            case 0:
                rank = chance.choice([-1, 99])
                driver.ranks.report(rank, receiving=[request_id], sending=[request_id])
            case 1:
                epoch = driver.epoch + chance.choice([-1, 1])
                driver.ranks.report(0, receiving=[request_id], epoch=epoch)
            case 2:
                driver.ranks.report(0, receiving=["unknown"], sending=["unknown"])
            case 3 if request_id not in driver.transfers.loading:
                driver.ranks.report(0, receiving=[request_id])

    @property
    def _has_everything(self) -> bool:
        """Forks, sessions, grammars, transfers, pauses, epochs and deadlines met in this run."""
        ids = " ".join(self.driver.names.values())
        was_late = any("load_timeout_s" in (e.message or "") for e in self.driver.finished.values())
        counts = (self.num_pauses, self.driver.adversary.epochs, self.driver.adversary.loads_begun)
        late = was_late or (self.num_waits and self.driver.adversary.abandoned)
        has_kinds = all(kind in ids for kind in ("fork", "session", "grammar"))
        return has_kinds and bool(late) and all(counts)

    def seen(self) -> dict[str, int]:
        """How often it has happened in this run."""
        driver, stats = self.driver, self.driver.scheduler.make_stats()
        return {
            "loads": len(driver.adversary.loads_begun),
            "abandoned loads": len(driver.adversary.abandoned),
            "preemptions": stats.num_preemptions,
            "rewinds": stats.num_rewinds,
            "stored blocks": len(driver.stored),
            "rejected reports": stats.num_bad_messages,
            "epochs": len(driver.adversary.epochs),
            "copied blocks": driver.num_copies,
            "accepted drafts": stats.num_accepted_tokens,
            "drafts against a grammar": sum(p.num_invalid_draft_tokens for p in driver.plans),
            "session inputs": sum(map(len, driver.continued.values())),
            "masks": sum(plan.has_structured_output for plan in driver.plans),
            "encoded items": sum(len(plan.encoder_inputs) for plan in driver.plans),
            "pooled": sum(len(end.pooled) > 0 for end in driver.finished.values()),
            "scored": len(driver.scored),
            "resets": self.num_resets,
            "pauses": self.num_pauses,
            "everything in one run": self._has_everything,
        }

    # The end

    def finish(self) -> None:
        """No new events: what is pending completes, until every request has ended."""
        driver = self.driver
        driver.scheduler.set_pause(PauseState.UNPAUSED)
        self.compiler.ready.add("all")
        self.compiler.lost.clear()
        driver.abort(*sorted(self.sessions - set(driver.finished)))
        for _ in range(3000):
            was_busy = bool(driver.unanswered)
            if driver.step() is not None or was_busy:
                if self.chance.random() < 0.3:
                    self._end_something()
            elif driver.transfers.is_idle and not driver.scheduler.has_unfinished_requests():
                break
            else:  # all that wait, wait for time or for a transfer
                driver.now += LOAD_TIMEOUT_S
                if driver.plan() is None:
                    self._end_something()
        if driver.scheduler.pins is not None:
            driver.scheduler.pins.release_kept(None)
        driver.check_idle()
        self._check_ends()

    def _end_something(self) -> None:
        self.act(self.chance.choice(["end_load", "end_send", "end_store", "end_swap"]))

    def _check_ends(self) -> None:
        """No request failed without a cause. The clients have checked the tokens."""
        driver = self.driver
        first: dict[str, RequestKey] = {}
        for key, request_id in driver.names.items():
            first.setdefault(request_id, key)
            end = driver.finished[key]
            if end.reason is FinishReason.ERROR:
                was_hit = driver.config.load_failure_policy == "fail" and self.may_fail
                is_namesake = first[request_id] != key
                assert (
                    is_namesake
                    or request_id in driver.not_finite
                    or (was_hit and request_id in driver.invalid_ids)
                    or "load_timeout_s" in (end.message or "")
                ), f"{request_id} failed without a cause: {end.message}"
            elif end.reason is FinishReason.LENGTH_CAPPED and "session" not in request_id:
                driver.check_complete(key)


class PressedPlayer(Player):
    """Running requests grow until some are swapped out, and less else happens."""

    MODES = ("swap", "swap", "auto")
    ACTIONS: ClassVar[dict[str, float]] = Player.ACTIONS | {
        "step": 60,
        "end_load": 20,
        "end_swap": 12,
        "pause": 0.3,
        "wait": 0.5,
        "die": 0.5,
        "reset": 0.5,
    }

    def _draw(self) -> tuple[str, str, list[int], dict[str, Any]]:
        kind, request_id, prompt, fields = super()._draw()
        most = self.driver.config.max_model_len - len(prompt)
        return kind, request_id, prompt, fields | {"max_tokens": self.chance.randrange(most) + 1}

    def seen(self) -> dict[str, int]:
        stats = self.driver.scheduler.make_stats()
        return super().seen() | {
            "swapped out": stats.num_swapped_out,
            "swapped in": stats.num_swapped_in,
            "no room": stats.num_swaps_refused,
        }


class JobsPlayer(Player):
    """Requests are turns of a few jobs, most of which go on, under the policy `continuum`: pins
    meet forks, sessions, transfers, preemption and new epochs.

    turns: the key of the newest request of each job.
    """

    POLICIES = ("continuum",)
    ACTIONS: ClassVar[dict[str, float]] = Player.ACTIONS | {"step": 40, "reset": 0.5, "die": 0.5}

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.turns: dict[str, RequestKey] = {}

    def _add(self) -> None:
        kind, request_id, prompt, fields = self._draw()
        job = self.chance.choice("abc")
        if kind in ("text", "scored") and (before := self._conversation(job)):
            most = self.driver.config.max_model_len - 12
            prompt = [*before, 20 + len(self.driver.names) % 70][:most]
            fields["cache_salt"] = None
        fields |= {"job_id": job, "is_last_step": self.chance.random() < 0.2}
        key = self.driver.add(request_id, prompt, **fields)
        if kind == "session":
            self.sessions.add(key)
        self.turns[job] = key

    def _conversation(self, job: str) -> list[int]:
        """Prompt and output of the job's newest turn."""
        key = self.turns.get(job)
        request = None if key is None else self.driver.requests.get(self.driver.names[key])
        if (
            request is None
            or request.options.multimodal
            or request.options.lora
            or request.options.cache_salt
        ):
            return []
        return request.token_ids.tolist()

    def seen(self) -> dict[str, int]:
        pins = self.driver.scheduler.pins
        if pins is None:  # in runs without a prefix cache
            return super().seen()
        return super().seen() | {
            "pin hits": pins.num_hits,
            "expired pins": pins.num_expired,
            "pins that yielded": pins.num_yielded,
        }


class HintingPlayer(PressedPlayer):
    """Requests ask to keep their KV, in a pool that is too small for them, and most forks have a
    grammar, so that drafts, masks and preemption meet.

    grammar_forks: their ids; num_retaining: actions after which a prefix is retained.
    """

    MODES = ("recompute", "recompute", "swap")
    ACTIONS: ClassVar[dict[str, float]] = PressedPlayer.ACTIONS | {
        "add": 12,
        "compile": 8,
        "lose": 4,
    }

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.compiler.ready.add("all")
        self.grammar_forks: set[str] = set()
        self.num_retaining = 0

    def act(self, action: str) -> None:
        super().act(action)
        self.num_retaining += len(self.driver.scheduler.kv_cache.pool.retained.prefixes) > 0

    def _draw(self) -> tuple[str, str, list[int], dict[str, Any]]:
        chance = self.chance
        kind, request_id, prompt, fields = super()._draw()
        fields["tenant"] = chance.choice([NO_TENANT, Tenant("a")])
        if chance.random() < 0.7:
            ttl_s = chance.choice([2.0, 10.0, 1000.0])
            fields["cache_hint"] = CacheHint(ttl_s, chance.choice([None, "s", "t"]))
        if kind == "fork" and chance.random() < 0.8:
            fields["structured_output"] = grammar_for(request_id)
            self.grammar_forks.add(request_id)
        return kind, request_id, prompt, fields

    def seen(self) -> dict[str, int]:
        ends = {
            self.driver.names[key]: end
            for key, end in self.driver.finished.items()
            if self.driver.names[key] in self.grammar_forks
        }
        return super().seen() | {
            "actions with retained prefixes": self.num_retaining,
            "forks with a grammar": len(ends),
            "lost grammars": self.compiler.num_lost,
            "their accepted drafts": sum(end.num_accepted_tokens for end in ends.values()),
            "their drafts against a grammar": sum(
                end.num_invalid_draft_tokens for end in ends.values()
            ),
            "their preemptions": sum(end.num_preemptions for end in ends.values()),
            "those with drafts that were preempted": sum(
                end.num_draft_tokens > 0 and end.num_preemptions > 0 for end in ends.values()
            ),
        }


class StatesPlayer(Player):
    """Models with states, many forks and sessions, and requests that go on after an answer.

    num_waiting: actions after which forks waited with a state; num_exact: sessions that held one.
    next_turns: by their ids, how many tokens the requests have that they go on after.
    """

    MODELS = ("state", "state", "states alone")
    ACTIONS: ClassVar[dict[str, float]] = Player.ACTIONS | {"add": 12, "go_on": 4}

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.num_waiting = self.num_exact = 0
        self.next_turns: dict[str, int] = {}

    def act(self, action: str) -> None:
        super().act(action)
        scheduler = self.driver.scheduler
        assert scheduler._forks.states is not None
        self.num_waiting += len(scheduler._forks.states.of_fork) > 0
        kinds = [request.hold.kind for request in scheduler._holds if request.hold is not None]
        self.num_exact += HoldKind.SESSION in kinds

    def _draw(self) -> tuple[str, str, list[int], dict[str, Any]]:
        kind, request_id, prompt, fields = super()._draw()
        what = self.chance.random()
        if kind == "text" and what < 0.4:
            parents = RandomRequests(self.chance, self.driver, {"fork": 1})
            return parents.draw()
        ended = [self.driver.names[key] for key in self.driver.finished]
        if kind == "text" and what < 0.8 and ended:
            before = self.driver.requests[self.chance.choice(ended)]
            options, tokens = before.options, before.token_ids.tolist()
            if not options.multimodal and len(tokens) < self.driver.config.max_model_len - 2:
                prompt = [*tokens, 20 + len(self.next_turns) % 70]
                fields |= {"cache_salt": options.cache_salt, "lora": options.lora}
                self.next_turns[request_id] = len(tokens)
        return kind, request_id, prompt, fields

    def seen(self) -> dict[str, int]:
        return super().seen() | {
            "kept states": sum(len(plan.kept_states) for plan in self.driver.plans),
            "actions with states of forks": self.num_waiting,
            "actions with states of sessions": self.num_exact,
            "next turns that begin with an answer": sum(
                start.num_computed_tokens in (before - 1, before) and not start.resumed
                for plan in self.driver.plans
                for start in plan.added
                if (before := self.next_turns.get(start.request_id)) is not None
            ),
        }


def play(seed: int, num_actions: int = 150, kind: type[Player] = Player) -> Player:
    """One random run."""
    player = kind(random.Random(seed))
    for _ in range(num_actions):
        player.act_randomly()
    player.finish()
    return player
