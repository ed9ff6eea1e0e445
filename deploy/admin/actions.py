"""The actions of an operator, as they are sent to the supervisor, and its answer.

One line of JSON each, over the private socket of the deployment, such as
`{"action": "pause", "engine": 1}`. The names are those of `longshore admin` and of the paths under
`/admin`.
"""

from typing import Annotated, Any, Final, TypeAlias, get_args

import msgspec

from longshore.protocol.commands import LogLevel, PauseMode, Role

SOCKET_NAME: Final = "admin"
"""Of the socket in the runtime directory."""
MAX_TIMEOUT_S: Final = 3600.0
MAX_PROFILE_S: Final = 60.0
MAX_REQUEST_BYTES: Final = 65_536

Timeout: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMEOUT_S)]
ProfileDuration: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=MAX_PROFILE_S)]
ProcessName: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]


class _Action(
    msgspec.Struct, tag_field="action", frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """engine: number of the engine; None: all."""

    engine: int | None = None


class Status(_Action, tag="status", frozen=True):
    """The state of each process."""


class PauseEngine(_Action, tag="pause", frozen=True):
    """See protocol.commands.Pause."""

    mode: PauseMode = "wait"
    timeout_s: Timeout = 30.0


class ResumeEngine(_Action, tag="resume", frozen=True):
    """End a pause, or a drain of one engine: it gets requests again."""


class SleepEngine(_Action, tag="sleep", frozen=True):
    """See protocol.commands.Sleep."""

    timeout_s: Timeout = 30.0


class WakeEngine(_Action, tag="wake", frozen=True):
    """End a sleep."""


class Drain(
    msgspec.Struct, tag_field="action", tag="drain", frozen=True, forbid_unknown_fields=True
):
    """Stop the deployment as SIGTERM does."""


class Restart(_Action, tag="restart", frozen=True):
    """Restart engines, one after the other. timeout_s: for the requests of one; None: the drain
    timeout of the deployment."""

    timeout_s: Timeout | None = None


class AddEngine(
    msgspec.Struct, tag_field="action", tag="add-engine", frozen=True, forbid_unknown_fields=True
):
    """Start one more engine. role: None: that of all engines."""

    role: Role | None = None


class _EngineChange(
    msgspec.Struct, tag_field="action", frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """timeout_s: for the requests of the engine; None: the drain timeout of the deployment."""

    engine: int
    timeout_s: Timeout | None = None


class DrainOneEngine(_EngineChange, tag="drain-engine", frozen=True):
    """Send it no new requests, until ResumeEngine, and wait for those that it has."""


class RemoveEngine(_EngineChange, tag="remove-engine", frozen=True):
    """Drain an engine and stop it. Requests that have not finished are resumed on another one."""


class ResetPrefixCache(_Action, tag="reset-prefix-cache", frozen=True):
    """preempt: running requests give up their blocks, and compute their KV again."""

    preempt: bool = False


class ResetEncoderCache(_Action, tag="reset-encoder-cache", frozen=True):
    """Drop all encoder outputs."""


class ResetConnectorCache(_Action, tag="reset-connector-cache", frozen=True):
    """Drop the KV that the connector has stored."""


class KVSnapshot(_Action, tag="kv-snapshot", frozen=True):
    """Which blocks are stored where; the answer is followed by JSON lines."""


class ReloadKeys(
    msgspec.Struct, tag_field="action", tag="reload-keys", frozen=True, forbid_unknown_fields=True
):
    """Read the key file again: its keys are valid from then on, and no others."""


class ProfileProcesses(_Action, tag="profile", frozen=True):
    """process: name of one process; None: all, or those of `engine`."""

    process: ProcessName | None = None
    duration_s: ProfileDuration = 5.0


class SetLevel(_Action, tag="log-level", frozen=True):
    """process: as in ProfileProcesses; None includes the supervisor unless `engine` is given."""

    level: LogLevel
    process: ProcessName | None = None


Action: TypeAlias = (
    Status
    | PauseEngine
    | ResumeEngine
    | SleepEngine
    | WakeEngine
    | Drain
    | Restart
    | AddEngine
    | DrainOneEngine
    | RemoveEngine
    | ResetPrefixCache
    | ResetEncoderCache
    | ResetConnectorCache
    | KVSnapshot
    | ReloadKeys
    | ProfileProcesses
    | SetLevel
)
ACTION_NAMES: Final = tuple(str(action.__struct_config__.tag) for action in get_args(Action))

_decoder: msgspec.json.Decoder[Action] = msgspec.json.Decoder(Action)


def decode_action(line: bytes) -> Action:
    """Raises msgspec.MsgspecError if it is not an action."""
    return _decoder.decode(line)


class Result(msgspec.Struct, frozen=True):
    """What an action did to one process or engine.

    values: the same as `message`, for programs.
    """

    process: str
    ok: bool
    message: str
    values: dict[str, Any] = {}


class Answer(msgspec.Struct, frozen=True):
    """The answer to an action. `error`: why nothing was done, because the action is not valid."""

    ok: bool
    results: tuple[Result, ...] = ()
    error: str | None = None

    @classmethod
    def of(cls, *results: Result) -> "Answer":
        return cls(all(result.ok for result in results), results)
