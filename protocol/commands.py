"""Commands of an operator: the supervisor sends them to its processes over their lifelines.

Every process obeys SetLogLevel and Profile; the others are for schedulers. Each command gets one
CommandAnswer.
"""

from typing import Literal, TypeAlias

import msgspec

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
PauseMode: TypeAlias = Literal["wait", "keep", "abort"]
CacheName: TypeAlias = Literal["prefix", "encoder", "connector"]


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


class DrainEngine(msgspec.Struct, tag="drain", frozen=True, forbid_unknown_fields=True):
    """The engine is to be restarted: clients send new requests to other engines. Answered when no
    request is left, or after `timeout_s`.

    holds_new: there is no other engine, so requests that do not run yet wait for the restart.
    """

    timeout_s: float
    holds_new: bool


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
    DescribeState | Pause | Resume | DrainEngine | ResetCache | WriteKVSnapshot
)
Command: TypeAlias = SetLogLevel | Profile | EngineCommand


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
