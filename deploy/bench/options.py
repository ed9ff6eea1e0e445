"""Settings of the benchmarks."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from longshore.deploy.cli.options import SHOWN_AS_DEMO_MODEL, EngineOptions
from longshore.deploy.cli.setting_checks import check_at_least
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(EngineOptions):
    """Prompts of random token ids, all passed to LLM at once.

    Attributes:
        model: Folder of the model, or its id on a model hub. Default: the bundled demo model.
        num_prompts: Prompts per run.
        input_len: Tokens per prompt, including the shared prefix.
        output_len: Tokens per answer; end-of-sequence ids are ignored.
        shared_prefix: Tokens that all prompts begin with.
        repeats: Measured runs, after a warm-up run; each has different prompts.
        in_process: Run the engine in this process.
        json: File for the result. Default: standard output.
    """

    model: Annotated[Path, SHOWN_AS_DEMO_MODEL] = DEMO_MODEL_DIR
    num_prompts: int = 64
    input_len: int = 256
    output_len: int = 128
    shared_prefix: int = 0
    repeats: int = 3
    in_process: bool = False
    json: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_prompts", "input_len", "output_len", "repeats"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("shared_prefix", self.shared_prefix, 0)


@dataclass(frozen=True, kw_only=True)
class ServeBenchOptions:
    """Requests of random token ids to a running server, at random times.

    Attributes:
        url: URL of the server.
        api_key: API key of the server.
        model: Name of the model. Default: the first that the server lists.
        num_prompts: Number of measured requests.
        num_warm_up: Number of requests sent before, one after the other, and not measured.
        request_rate: Mean arrivals per second, at random (Poisson) times; inf sends all at once.
        max_concurrency: Maximum number of requests in flight; later ones wait at the client.
        input_len: Tokens per prompt, including the shared prefix.
        output_len: Tokens per answer; end-of-sequence ids are ignored.
        shared_prefix: Tokens that all prompts begin with.
        vocab_size: Prompts consist of ids below it. Default: the server's value.
        timeout_s: Seconds to wait for one answer.
        seed: Seed of prompts and arrival times.
        json: File for the result. Default: standard output.
    """

    url: str = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    num_prompts: int = 100
    num_warm_up: int = 1
    request_rate: float = math.inf
    max_concurrency: int | None = None
    input_len: int = 128
    output_len: int = 32
    shared_prefix: int = 0
    vocab_size: int | None = None
    timeout_s: float = 600.0
    seed: int = 0
    json: Path | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "max_concurrency", "vocab_size"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("num_warm_up", "shared_prefix"):
            check_at_least(name, getattr(self, name), 0)
        for name in ("request_rate", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
