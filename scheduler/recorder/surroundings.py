"""What the scheduler was given (connectors, grammars, a policy of another package): recorded, and
in a replay played.

A recorder passes every call on and notes the answer; a player returns the noted answers in order.
What a connector asks of the scheduler during a call, to hold blocks, is noted and played as well.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from longshore.connectors.base import EncoderConnector, SchedulerConnector
from longshore.connectors.base.encoder import CacheLookup
from longshore.connectors.base.views import BlockHolds
from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.features.grammar import (
    Grammar,
    GrammarCompiler,
    GrammarError,
    GrammarLost,
    InvalidGrammar,
)
from longshore.scheduler.features.tool_calls import Decoder
from longshore.scheduler.queue.policies import (
    FCFSQueue,
    Order,
    PolicyRequest,
    PriorityQueue,
    RequestQueue,
    SchedulingPolicy,
)
from longshore.scheduler.recorder.entries import Event, RecordError
from longshore.scheduler.recorder.graph import (
    Given,
    GraphError,
    Plain,
    decode_graph,
    encode_graph,
)

logger = logging.getLogger(__name__)

CONNECTOR: Final = "connector"
ENCODER_CONNECTOR: Final = "encoder connector"
GRAMMARS: Final = "grammars"
GRAMMAR: Final = "grammar"
DECODER: Final = "decoder"
SILENT: Final = ("experts", "block_metrics", "trace")
"""Arguments of the scheduler that decide nothing."""

POLICY: Final = "policy"
HOLDS: Final = "holds"

_INLINE: Final = (type(None), bool, int, bytes)

CONNECTOR_HOOKS: Final = (
    "on_new_request",
    "skips_prefix_cache",
    "get_num_new_matched_tokens",
    "take_answered",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "release_transfers",
    "load_abandoned",
    "swap_size",
    "swap_out",
    "release_swap",
    "take_events",
    "get_kv_connector_stats",
    "reset_cache",
    "on_new_epoch",
    "shutdown",
)
CONNECTOR_VALUES: Final = (
    "contract_version",
    "supports_hma",
    "can_swap",
    "needs_every_step",
    "reads_ahead",
    "names_answers",
    "num_leasable_blocks",
    "chunk_blocks",
    "min_wait_s",
)
ENCODER_HOOKS: Final = (
    "has_caches",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "reset_cache",
    "on_new_epoch",
)
GRAMMAR_METHODS: Final = ("is_compiled", "accept_tokens", "num_valid", "fill_masks", "release")


_MISSING: Final = b"?"  # no graph begins so


class NotRecorded(RecordError):
    """The record lacks something that the scheduler got, because it cannot be encoded."""


def encode_argument(value: Any) -> bytes:
    """The graph of an argument or an answer. What cannot be encoded is left out, because the
    scheduler must not notice that it is recorded; a replay ends there."""
    try:
        return encode_graph(value)
    except GraphError as error:
        logger.warning("the record cannot be replayed from here on: %s", error)
        return _MISSING + str(error).encode()


def decode_argument(data: bytes) -> Any:
    """Raises NotRecorded, or GraphError as `decode_graph` does."""
    if data.startswith(_MISSING):
        raise NotRecorded(data[len(_MISSING) :].decode(errors="replace"))
    return decode_graph(data)


class Tape:
    """Events of the call of the scheduler that is going on, if one is."""

    def __init__(self) -> None:
        self.is_open = False
        self._events: list[Event] = []

    def take_events(self) -> tuple[Event, ...]:
        """The events since the last call; the call is over."""
        self.is_open = False
        if not self._events:
            return ()
        events, self._events = tuple(self._events), []
        return events

    def note(self, source: str, method: str, answer: Any) -> None:
        """Outside of a call nothing is noted: it changes nothing of the scheduler."""
        if not self.is_open:
            return
        if type(answer) in _INLINE:
            self._events.append(Event(source, method, answer))
        else:
            self._events.append(Event(source, method, graph=encode_argument(answer)))

    def ask(self, source: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method and note its answer, or what it raises."""
        try:
            answer = method(*arguments)
        except Exception as error:
            if self.is_open:
                text = f"{type(error).__name__}: {error}"
                self._events.append(Event(source, method.__name__, error=text))
            raise
        self.note(source, method.__name__, answer)
        return answer


class _HoldsRecorder:
    """The scheduler as its connector sees it. outside: gets what is asked while no hook runs."""

    def __init__(self, holds: BlockHolds, tape: Tape, outside: Callable[[str, Any], None]) -> None:
        self._holds = holds
        self._tape = tape
        self._outside = outside

    def hold(self, block_ids: Sequence[int]) -> int:
        hold_id = self._holds.hold(block_ids)
        self._note("hold", list(map(int, block_ids)))
        return hold_id

    def release(self, hold_id: int) -> None:
        self._holds.release(hold_id)
        self._note("release", hold_id)

    def release_rank(self, hold_id: int, rank: int) -> bool:
        is_released = self._holds.release_rank(hold_id, rank)
        if is_released:
            self._note("release", hold_id)
        return is_released

    def _note(self, method: str, argument: Any) -> None:
        if self._tape.is_open:
            self._tape.note(HOLDS, method, argument)
        else:
            self._outside(method, argument)


def _named_like(real: object, recorder: type) -> type:
    """A subclass with the name of the real object's class, which messages contain."""
    return type(type(real).__name__, (recorder,), {})


class _Recorder(Given):
    """kind, number: of the real object, which it passes all calls on to."""

    _kind = ""
    _number = 0
    _values: tuple[str, ...] = ()

    def __init__(self, real: Any, tape: Tape) -> None:
        self._real = real
        self._tape = tape

    def given(self) -> tuple[str, int, dict[str, Plain]]:
        values = {name: getattr(self._real, name) for name in self._values}
        return self._kind, self._number, {**values, "name": type(self._real).__name__}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _ask(self, name: str, *arguments: Any) -> Any:
        source = f"{self._kind} {self._number}" if self._number else self._kind
        return self._tape.ask(source, getattr(self._real, name), *arguments)


def _passes_on(cls: type, names: tuple[str, ...]) -> None:
    for name in names:

        def method(self: Any, *arguments: Any, _name: str = name) -> Any:
            return self._ask(_name, *arguments)

        method.__name__ = name
        setattr(cls, name, method)


class _ConnectorRecorder(_Recorder, SchedulerConnector):
    _kind = CONNECTOR
    _values = CONNECTOR_VALUES

    def __init__(self, real: Any, tape: Tape, outside: Callable[[str, Any], None]) -> None:
        super().__init__(real, tape)
        self._outside = outside
        for name in (*CONNECTOR_VALUES, "config"):
            setattr(self, name, getattr(real, name, None))

    def bind_blocks(self, holds: BlockHolds) -> None:
        self._real.bind_blocks(_HoldsRecorder(holds, self._tape, self._outside))

    @property
    def has_pending_work(self) -> bool:
        answer = self._real.has_pending_work
        self._tape.note(CONNECTOR, "has_pending_work", answer)
        return bool(answer)


class _EncoderConnectorRecorder(_Recorder, EncoderConnector):
    _kind = ENCODER_CONNECTOR

    @property
    def num_missed(self) -> int:  # type: ignore[override]  # the real one counts
        return int(self._real.num_missed)

    @property
    def has_pending_work(self) -> bool:
        answer = self._real.has_pending_work
        self._tape.note(ENCODER_CONNECTOR, "has_pending_work", answer)
        return bool(answer)


class _GrammarRecorder(_Recorder):
    _kind = GRAMMAR

    def __init__(self, real: Grammar, tape: Tape, number: int) -> None:
        super().__init__(real, tape)
        self._number = number


class _GrammarsRecorder(_Recorder):
    _kind = GRAMMARS

    def compile(self, grammar_id: int, spec: StructuredOutput) -> Any:
        grammar = self._real.compile(grammar_id, spec)
        self._tape.note(GRAMMARS, "compile", grammar_id)
        return _GrammarRecorder(grammar, self._tape, grammar_id)

    def next_compiled(self) -> Any:
        return self._ask("next_compiled")

    def flush(self) -> None:
        self._real.flush()


class _Silent(_Recorder):
    """An object that decides nothing: in a replay it does nothing, so what it asks of others is not
    noted."""

    def __init__(self, real: Any, tape: Tape, kind: str) -> None:
        super().__init__(real, tape)
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        return functools.partial(self._call, value) if callable(value) else value

    def _call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        tape = self._tape
        was_open, tape.is_open = tape.is_open, False
        try:
            return method(*arguments, **named)
        finally:
            tape.is_open = was_open


class _DecoderRecorder(_Recorder):
    _kind = DECODER

    def __call__(self, token_ids: list[int]) -> str:
        return str(self._tape.ask(DECODER, self._decode, token_ids))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._real(token_ids))


class PolicyRecorder(_Recorder, SchedulingPolicy):
    """A policy of another package. Its own state is part of a snapshot, if it can be encoded, so
    that a replay can continue with the policy itself."""

    _kind = POLICY
    _is_ordered = False

    def __init__(self, real: SchedulingPolicy, tape: Tape) -> None:
        super().__init__(real, tape)
        self.ignores_priority = real.ignores_priority  # type: ignore[misc]  # of this instance

    def given(self) -> tuple[str, int, dict[str, Plain]]:
        try:
            state = encode_graph(self._real, allows=lambda path: True)
        except GraphError:
            state = b""
        values = {"ignores_priority": self.ignores_priority, "is_ordered": self._is_ordered}
        return POLICY, 0, {"state": state, **values}

    def make_queue(self) -> RequestQueue[Any]:
        queue = self._real.make_queue()
        self._is_ordered = type(queue) is PriorityQueue
        if type(queue) is not PriorityQueue:
            return queue  # type: ignore[no-any-return]
        self._real_order = queue.order
        return PriorityQueue(self.order)

    def order(self, request: PolicyRequest) -> Order:
        """The real policy's order."""
        answer = self._tape.ask(POLICY, self._order_by_real, request)
        return answer  # type: ignore[no-any-return]

    def _order_by_real(self, request: PolicyRequest) -> Order:
        return self._real_order(request)

    def prefers_skipped(self, waiting: PolicyRequest, skipped: PolicyRequest) -> bool:
        return self._ask("prefers_skipped", waiting, skipped)  # type: ignore[no-any-return]

    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        return self._ask("pick_victim", running)  # type: ignore[no-any-return]

    def arrived(self, request: PolicyRequest) -> None:
        self._ask("arrived", request)

    def ended(self, request: PolicyRequest) -> None:
        self._ask("ended", request)


_passes_on(_ConnectorRecorder, CONNECTOR_HOOKS)
_passes_on(_EncoderConnectorRecorder, ENCODER_HOOKS)
_passes_on(_GrammarRecorder, GRAMMAR_METHODS)


def record_connector(
    connector: SchedulerConnector, tape: Tape, outside: Callable[[str, Any], None]
) -> SchedulerConnector:
    """outside: gets what the connector asks of the scheduler while no hook is called."""
    recorder: SchedulerConnector = _named_like(connector, _ConnectorRecorder)(
        connector, tape, outside
    )
    return recorder


def record_encoder_connector(connector: EncoderConnector, tape: Tape) -> EncoderConnector:
    recorder: EncoderConnector = _named_like(connector, _EncoderConnectorRecorder)(connector, tape)
    return recorder


def record_grammars(compiler: GrammarCompiler, tape: Tape) -> GrammarCompiler:
    return _GrammarsRecorder(compiler, tape)


def record_decoder(decode: Decoder, tape: Tape) -> Decoder:
    return _DecoderRecorder(decode, tape)


def silence(given: Any, tape: Tape, kind: str) -> Any:
    """A stand-in for an object whose answers do not decide what is planned."""
    return _Silent(given, tape, kind)


# Players


class Holder(Protocol):
    """What a played connector asks of the scheduler."""

    def hold(self, block_ids: Sequence[int]) -> int: ...

    def release(self, hold_id: int) -> None: ...


class AnswersDiffer(RecordError):
    """The replayed scheduler asks for something else than the recorded one did."""


class Player:
    """The events of the call that is being replayed.

    holds: the scheduler's transfers, which hold blocks for the connector.
    policy_differs: answers of the real policy, which runs in the replay, that differ.
    """

    def __init__(self) -> None:
        self.holds: Holder | None = None
        self.policy_differs: list[str] = []
        self._events: deque[Event] = deque()
        self.is_open = False

    def begin(self, events: Sequence[Event]) -> None:
        """The events of the next call."""
        self._events = deque(events)
        self.is_open = True

    def end(self) -> None:
        """The call is over. Raises AnswersDiffer if there are events left."""
        self.is_open = False
        if self._events:
            event = self._events[0]
            raise AnswersDiffer(f"the recorded scheduler also asked for {event.method}")

    def answer(self, source: str, method: str) -> Any:
        """The noted answer. Raises AnswersDiffer if the record has another question, and what the
        object raised."""
        while self._events:
            event = self._events.popleft()
            if event.source == HOLDS and self.holds is not None:
                hold = self.holds.hold if event.method == "hold" else self.holds.release
                hold(_answer_of(event))
                continue
            if (event.source, event.method) != (source, method):
                raise AnswersDiffer(
                    f"it asks for {method} of {source}, the record has {event.method} of "
                    f"{event.source}"
                )
            if event.error:
                raise _error_of(event.error)
            return _answer_of(event)
        raise AnswersDiffer(f"it asks for {method} of {source}, the record ends before that")

    def find_given(self, kind: str, number: int, values: dict[str, Any]) -> Any:
        """What takes the place of a given object; the policy can be replaced."""
        match kind:
            case "connector":
                connector = _ConnectorPlayer(self)
                for name in CONNECTOR_VALUES:
                    setattr(connector, name, values[name])
                return connector
            case "encoder connector":
                return _EncoderConnectorPlayer(self)
            case "grammars":
                return _GrammarsPlayer(self)
            case "grammar":
                return _GrammarPlayer(self, number)
            case "decoder":
                return _DecoderPlayer(self)
            case "policy":
                return PolicyPlayer(self, values)
            case kind if kind in SILENT:
                return _SilentPlayer()
        raise GraphError(f"unknown object {kind!r:.50}")


def _answer_of(event: Event) -> Any:
    return decode_argument(event.graph) if event.graph else event.answer


_ERRORS: Final = {error.__name__: error for error in (GrammarError, InvalidGrammar, GrammarLost)}


def _error_of(text: str) -> Exception:
    name, _, message = text.partition(": ")
    return _ERRORS[name](message) if name in _ERRORS else RecordError(text)


class _PlayedConnector:
    _source = ""

    def __init__(self, player: Player) -> None:
        self._player = player

    def _play(self, name: str, default: Any = None) -> Any:
        return self._player.answer(self._source, name) if self._player.is_open else default

    @property
    def has_pending_work(self) -> bool:
        return bool(self._play("has_pending_work", False))


class _ConnectorPlayer(_PlayedConnector, SchedulerConnector):
    _source = CONNECTOR


class _EncoderConnectorPlayer(_PlayedConnector, EncoderConnector):
    _source = ENCODER_CONNECTOR

    def has_caches(self, item: object) -> CacheLookup:
        return self._play("has_caches", CacheLookup.MISSING)  # type: ignore[no-any-return]


class _GrammarPlayer:
    """Masks stay empty: they are no part of a plan."""

    def __init__(self, player: Player, number: int) -> None:
        self._player = player
        self._source = f"{GRAMMAR} {number}"

    def _play(self, name: str) -> Any:
        return self._player.answer(self._source, name)


class _GrammarsPlayer:
    def __init__(self, player: Player) -> None:
        self._player = player

    def compile(self, grammar_id: int, spec: StructuredOutput) -> Any:
        return _GrammarPlayer(self._player, self._player.answer(GRAMMARS, "compile"))

    def next_compiled(self) -> Any:
        return self._player.answer(GRAMMARS, "next_compiled")

    def flush(self) -> None:
        pass


class _DecoderPlayer:
    def __init__(self, player: Player) -> None:
        self._player = player

    def __call__(self, token_ids: list[int]) -> str:
        return str(self._player.answer(DECODER, "_decode"))


class _SilentPlayer:
    """Every method does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None


def _plays(cls: type, names: tuple[str, ...]) -> None:
    for name in names:

        def method(self: Any, *arguments: Any, _name: str = name) -> Any:
            return self._play(_name)

        method.__name__ = name
        setattr(cls, name, method)


_plays(_ConnectorPlayer, CONNECTOR_HOOKS)
_plays(_EncoderConnectorPlayer, tuple(name for name in ENCODER_HOOKS if name != "has_caches"))
_plays(_GrammarPlayer, GRAMMAR_METHODS)


class PolicyPlayer(SchedulingPolicy):
    """Returns the recorded answers of a policy. With `real`, it asks that policy and compares.

    state: the recorded state of the policy; empty if it could not be encoded.
    """

    def __init__(self, player: Player, values: dict[str, Any]) -> None:
        self._player = player
        self.state: bytes = values["state"]
        self.ignores_priority = values["ignores_priority"]  # type: ignore[misc]
        self._is_ordered = values["is_ordered"]
        self.real: SchedulingPolicy | None = None
        self._real_order: Callable[[PolicyRequest], Order] | None = None

    def run(self, real: SchedulingPolicy) -> None:
        """Ask this policy from now on."""
        self.real = real
        queue = real.make_queue()
        self._real_order = queue.order if type(queue) is PriorityQueue else None

    def make_queue(self) -> RequestQueue[Any]:
        return PriorityQueue(self.order) if self._is_ordered else FCFSQueue()

    def order(self, request: PolicyRequest) -> Order:
        return self._answer("order", "_order_by_real", self._real_order, (request,))  # type: ignore[no-any-return]

    def prefers_skipped(self, waiting: PolicyRequest, skipped: PolicyRequest) -> bool:
        return bool(self._of_real("prefers_skipped", waiting, skipped))

    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        return self._of_real("pick_victim", running)  # type: ignore[no-any-return]

    def arrived(self, request: PolicyRequest) -> None:
        self._of_real("arrived", request)

    def ended(self, request: PolicyRequest) -> None:
        self._of_real("ended", request)

    def _of_real(self, name: str, *arguments: Any) -> Any:
        real = None if self.real is None else getattr(self.real, name)
        return self._answer(name, name, real, arguments)

    def _answer(
        self, name: str, noted: str, real: Callable[..., Any] | None, arguments: tuple[Any, ...]
    ) -> Any:
        if not self._player.is_open:
            return None if real is None else real(*arguments)
        recorded = self._player.answer(POLICY, noted)
        if real is None:
            return recorded
        answer = real(*arguments)
        if answer != recorded:
            self._player.policy_differs.append(f"{name} returned {answer!r}, not {recorded!r}")
        return answer
