"""Settings of the benchmarks."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.settings.checks import check_at_least
from longshore.deploy.settings.options import EngineOptions
from longshore.deploy.settings.parameters import SHOWN_AS_DEMO_MODEL
from longshore.protocol.errors import ConfigError

BACKENDS: Final = ("longshore", "openai", "vllm")
COMPLETIONS: Final = "/v1/completions"


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
        check_at_least("seed", self.seed, 0)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(EngineOptions):
    """A batch of prompts of random token ids, passed to LLM again and again.

    Attributes:
        model: Folder of the model, or its id on a model hub. Default: the bundled demo model.
        batch_size: Prompts per run.
        input_len: Tokens per prompt.
        output_len: Tokens per answer; end-of-sequence ids are ignored.
        num_iters: Measured runs; each has different prompts.
        num_iters_warmup: Runs before, which are not measured.
        json: File for the result. Default: standard output.
    """

    model: Annotated[Path, SHOWN_AS_DEMO_MODEL] = DEMO_MODEL_DIR
    batch_size: int = 8
    input_len: int = 32
    output_len: int = 128
    num_iters: int = 10
    num_iters_warmup: int = 2
    json: Annotated[Path | None, Parameter(alias="--output-json")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "input_len", "output_len", "num_iters"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("num_iters_warmup", "seed"):
            check_at_least(name, getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True)
class ServeBenchOptions:
    """Requests of random token ids to a running server, at random times.

    Attributes:
        url: URL of the server.
        backend: The server's API, as vLLM's benchmark names it. Prompts are token ids, so
            only completions can be measured: vllm, openai or longshore, which are the same.
        endpoint: Path of the server's completions.
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

    url: Annotated[str, Parameter(alias="--base-url")] = "http://127.0.0.1:8000"
    backend: str = "longshore"
    endpoint: str = COMPLETIONS
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    num_prompts: int = 100
    num_warm_up: Annotated[int, Parameter(alias="--num-warmups")] = 1
    request_rate: float = math.inf
    max_concurrency: int | None = None
    input_len: Annotated[int, Parameter(alias="--random-input-len")] = 128
    output_len: Annotated[int, Parameter(alias="--random-output-len")] = 32
    shared_prefix: Annotated[int, Parameter(alias="--random-prefix-len")] = 0
    vocab_size: int | None = None
    timeout_s: float = 600.0
    seed: int = 0
    json: Path | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"backend={self.backend!r} is not supported: prompts are random token ids, which "
                f"only completions take. Use one of {', '.join(BACKENDS)}"
            )
        if not self.endpoint.endswith("/completions") or self.endpoint.endswith(
            "/chat/completions"
        ):
            raise ConfigError(
                f"endpoint={self.endpoint!r} is not supported: prompts are random token ids, which "
                f"only completions take. Use {COMPLETIONS}"
            )
        for name in ("num_prompts", "input_len", "output_len", "max_concurrency", "vocab_size"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("num_warm_up", "shared_prefix", "seed"):
            check_at_least(name, getattr(self, name), 0)
        for name in ("request_rate", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")


@dataclass(frozen=True, kw_only=True)
class FitCostOptions:
    """Measurements of an idle server, to which a cost model is fitted.

    Attributes:
        url: URL of the server: one engine, with the default asynchronous scheduling.
        api_key: API key of the server.
        model: Name of the model. Default: the first that the server lists.
        output: File for the cost model.
        kv_bytes_per_token: Bytes of KV per token, of all workers, as `longshore doctor --plan`
            shows them.
        max_num_batched_tokens: Tokens per step that the server was started with.
        batch_sizes: Numbers of requests that decode together. At most the server's max_num_seqs.
        prompt_lens: Tokens per prompt.
        output_len: Tokens per answer, over which the time per token is measured.
        repeats: Measurements of each point, of which the median counts.
        vocab_size: Prompts consist of ids below it. Default: the server's value.
        timeout_s: Seconds to wait for one answer.
        seed: Seed of prompts.
    """

    url: str = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    output: Path = Path("cost-model.json")
    kv_bytes_per_token: int = 131_072
    max_num_batched_tokens: int = 2048
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    prompt_lens: tuple[int, ...] = (16, 64, 256, 512, 1024, 1536)
    output_len: int = 128
    repeats: int = 5
    vocab_size: int | None = None
    timeout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "repeats", "vocab_size"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("kv_bytes_per_token", self.kv_bytes_per_token, 2)
        check_at_least("output_len", self.output_len, 8)
        check_at_least("seed", self.seed, 0)
        for name in ("batch_sizes", "prompt_lens"):
            values = getattr(self, name)
            for value in values:
                check_at_least(name, value, 1)
            if len(set(values)) < 2:
                raise ConfigError(f"{name}={values} must have at least two different values")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s} must be above 0")


@dataclass(frozen=True, kw_only=True)
class AgentsOptions:
    """A workload of jobs of coding agents, as JSON lines.

    Attributes:
        out: File for the workload.
        num_jobs: Number of jobs.
        job_rate: Mean arrivals of jobs per second, at random (Poisson) times; inf starts all at
            once.
        turns: Turns of each job. Default: drawn for each job, 33 on average.
        token_scale: Factor for the sizes of prompts and outputs, for models with a short context.
        max_tokens: A job ends before its conversation has more tokens.
        seed: Seed of the workload.
    """

    out: Path = Path("jobs.jsonl")
    num_jobs: int = 100
    job_rate: float = 0.1
    turns: int | None = None
    token_scale: float = 1.0
    max_tokens: int = 131_072
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_jobs", "turns", "max_tokens"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("seed", self.seed, 0)
        for name in ("job_rate", "token_scale"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")


@dataclass(frozen=True, kw_only=True)
class JobsOptions:
    """Jobs of agents on a running server: each turn follows the end of the one before.

    Attributes:
        file: Workload, as `longshore bench agents` writes it.
        url: URL of the server.
        api_key: API key of the server.
        model: Name of the model. Default: the first that the server lists.
        time_scale: Factor for arrivals and gaps, for a machine that is slower or faster than the
            workload assumes.
        vocab_size: Prompts consist of ids below it. Default: the server's value.
        timeout_s: Seconds to wait for one answer.
        seed: Seed of the prompts.
        json: File for the result. Default: standard output.
    """

    file: Path = Path("jobs.jsonl")
    url: str = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    time_scale: float = 1.0
    vocab_size: int | None = None
    timeout_s: float = 3600.0
    seed: int = 0
    json: Path | None = None

    def __post_init__(self) -> None:
        check_at_least("vocab_size", self.vocab_size, 1)
        check_at_least("seed", self.seed, 0)
        if not self.time_scale >= 0:
            raise ConfigError(f"time_scale={self.time_scale} must be at least 0")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s} must be above 0")
