"""The settings of commands that talk to a running server."""

from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from longshore.deploy.cli.options import check_at_least, check_duration


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """A look at a running engine, or at the machine.

    Attributes:
        machine: Look at this machine instead: versions, devices, processors, memory, limits, the
            port, and which optional libraries load.
        url: Address of the server, as `longshore serve` prints it.
        api_key: Key that the server wants.
        json: Print JSON instead of tables.
        stall_after_s: An engine with requests of which none advances for so long is stalled.
        timeout_s: How long the server may take to answer.
    """

    machine: bool = False
    url: Annotated[str, Parameter(alias="--engine")] = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)
    json: bool = False
    stall_after_s: float = 10.0
    timeout_s: float = 15.0

    def __post_init__(self) -> None:
        for name in ("stall_after_s", "timeout_s"):
            check_duration(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """A conversation with a running server. What is not given, the model's defaults say.

    Attributes:
        url: Address of the server, as `longshore serve` prints it.
        api_key: Key that the server wants.
        model: Name of the model. Default: the first that the server lists.
        system: What the model is told before everything else.
        temperature: 0 always takes the likeliest token.
        top_p: Share of the probability that tokens are drawn from.
        max_tokens: Of an answer.
        seed: Makes answers repeatable.
        timeout_s: For one answer.
    """

    url: str = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    system: str = ""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_at_least("max_tokens", self.max_tokens, 1)
        check_duration("timeout_s", self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class TopOptions:
    """A live view of a running server.

    Attributes:
        url: Address of the server, as `longshore serve` prints it.
        api_key: Key that the server wants.
        interval_s: Between two looks.
        num_looks: End after so many. Default: `q` or Ctrl-C ends it.
        json: Print a line of JSON per look instead.
        timeout_s: How long the server may take to answer.
    """

    url: str = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)
    interval_s: float = 1.0
    num_looks: int | None = None
    json: bool = False
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        check_at_least("num_looks", self.num_looks, 1)
        for name in ("interval_s", "timeout_s"):
            check_duration(name, getattr(self, name))
