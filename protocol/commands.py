"""Commands of an operator: the supervisor sends them to its processes over their lifelines.

Every process obeys SetLogLevel and Profile, gateways UseEngine, ReleaseEngine and UseKeys; the
others are for schedulers. Each command gets one CommandAnswer.
"""

from typing import Final, Literal, TypeAlias

import msgspec

from longshore.protocol.events import EventSource
from longshore.protocol.transport.channel import Endpoint

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
PauseMode: TypeAlias = Literal["wait", "keep", "abort"]
CacheName: TypeAlias = Literal["prefix", "encoder", "connector"]
Role: TypeAlias = Literal["unified", "prefill", "decode"]
"""What an engine is for: whole requests, only their first token, or only what comes after it."""


DRAINING: Final = "draining for a restart by the operator"
DRAINED: Final = "drained by the operator"
"""Why an engine admits no requests, before an operator stops or restarts it."""


class SetLogLevel(msgspec.Struct, tag="log_level", frozen=True, forbid_unknown_fields=True):
    """Log records of this level and above, also after a restart."""

    level: LogLevel


class Profile(msgspec.Struct, tag="profile", frozen=True, forbid_unknown_fields=True):
    """Sample the stacks of all threads for `duration_s` and write them to the new file `path`."""

    duration_s: float
    path: str


class DescribeState(msgspec.Struct, tag="describe", frozen=True, forbid_unknown_fields=True):
    """Answer with the engine's counts and whether it is paused."""


class Pause(msgspec.Struct, tag="pause", frozen=True, forbid_unknown_fields=True):
    """Admit no more requests, which wait until Resume, also after a restart: nothing runs then.

    mode:      wait: running requests finish, and the answer is sent when they have, or after
               `timeout_s`. keep: running requests stop, and keep their blocks. abort: all requests
               are aborted.
    """

    mode: PauseMode
    timeout_s: float = 0.0


class Resume(msgspec.Struct, tag="resume", frozen=True, forbid_unknown_fields=True):
    """End a pause."""


class Sleep(msgspec.Struct, tag="sleep", frozen=True, forbid_unknown_fields=True):
    """Free the memory of the workers' devices until Wake, also after a restart. New requests wait.
    Running ones have `timeout_s` to finish; the others, and the KV of prefixes, are computed again
    after Wake. Answered when the workers sleep."""

    timeout_s: float


class Wake(msgspec.Struct, tag="wake", frozen=True, forbid_unknown_fields=True):
    """End a sleep. Answered when the workers are ready again."""


class DrainEngine(msgspec.Struct, tag="drain", frozen=True, forbid_unknown_fields=True):
    """Clients send new requests to other engines. Answered when no request is left and other
    engines have pulled the KV that is kept for them, or after `timeout_s`.

    holds_new: there is no other engine, so requests that do not run yet wait for a restart.
    is_final:  the engine is to be restarted; False: Resume ends it, and it holds after a restart.
    """

    timeout_s: float
    holds_new: bool = False
    is_final: bool = True


class ResetCache(msgspec.Struct, tag="reset", frozen=True, forbid_unknown_fields=True):
    """Empty a cache; fails if requests or transfers need it.

    preempts: of the prefix cache: preempt running requests, which compute their KV again.
    """

    cache: CacheName
    preempts: bool = False


class WriteKVSnapshot(msgspec.Struct, tag="kv_snapshot", frozen=True, forbid_unknown_fields=True):
    """Write what a subscriber of KV events would know to the new file `path`, as JSON lines."""

    path: str


EngineCommand: TypeAlias = (
    DescribeState | Pause | Resume | Sleep | Wake | DrainEngine | ResetCache | WriteKVSnapshot
)


class EngineMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine of a deployment, for gateways.

    number:  of this engine; no later one has the same.
    clients: where its scheduler takes requests.
    events:  where it publishes its KV events; None if gateways do not follow them.
    """

    number: int
    role: Role
    clients: Endpoint
    events: EventSource | None = None


class UseEngine(msgspec.Struct, tag="use_engine", frozen=True, forbid_unknown_fields=True):
    """A new engine is ready; requests can be sent to it. Answered when the gateway is connected."""

    member: EngineMember


class ReleaseEngine(msgspec.Struct, tag="release_engine", frozen=True, forbid_unknown_fields=True):
    """An engine is about to end: resume its requests on other ones, and send nothing to it."""

    engine: int


class UseKeys(msgspec.Struct, tag="use_keys", frozen=True, forbid_unknown_fields=True):
    """The API keys have changed. path: of a private file with all of them, as JSON; it is replaced
    by the next change."""

    path: str


GatewayCommand: TypeAlias = UseEngine | ReleaseEngine | UseKeys
Command: TypeAlias = SetLogLevel | Profile | EngineCommand | GatewayCommand


class NumberedCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command as it is sent; the answer has its number."""

    number: int
    command: Command


class CommandAnswer(msgspec.Struct, tag="answer", frozen=True, forbid_unknown_fields=True):
    """The answer to one command.

    ok:      the command was carried out.
    message: what was done, or why not, for an operator.
    values:  the same for programs.
    """

    number: int
    ok: bool
    message: str
    values: dict[str, str | int | float | bool] = {}
