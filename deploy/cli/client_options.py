"""The settings of commands that talk to a running server, and of plans of a KV cache."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import Parameter
from msgspec import Meta

from longshore.connectors.options import parse_size
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.settings.checks import (
    check_at_least,
    check_device,
    check_duration,
)
from longshore.deploy.settings.options import EngineOptions
from longshore.deploy.settings.parameters import SHOWN_AS_DEMO_MODEL, with_parameters_of
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import KVCacheDtype
from longshore.protocol.settings import Settings
from longshore.worker.config import Dtype, check_context_parallel_size

MAX_BLOCK_BYTES: Final = 1 << 30
MAX_BLOCK_TOKENS: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """An examination of a running engine, or of the machine.

    Attributes:
        machine: Check this machine instead: versions, devices, processors, memory, limits, the
            port, and which optional libraries load.
        bandwidth: Measure how fast this machine moves KV blocks instead: within host memory, and to
            and from the disk of `path`. Takes a few seconds.
        path: Folder on the disk to measure. Default: no disk is measured.
        block_bytes: Size of the blocks to measure, as 2MiB or a number of bytes.
        block_tokens: Tokens per block, for the rate in tokens.
        url: URL of the server, as `longshore serve` prints it.
        api_key: API key of the server.
        json: Print JSON instead of tables.
        stall_after_s: Seconds without progress of any request after which an engine counts as
            stalled.
        timeout_s: Seconds to wait for the server's answer.
    """

    machine: bool = False
    bandwidth: bool = False
    path: Path | None = None
    block_bytes: str = "2MiB"
    block_tokens: int = 16
    url: Annotated[str, Parameter(alias="--engine")] = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)
    json: bool = False
    stall_after_s: float = 10.0
    timeout_s: float = 15.0

    def __post_init__(self) -> None:
        for name in ("stall_after_s", "timeout_s"):
            check_duration(name, getattr(self, name))
        if self.machine and self.bandwidth:
            raise ConfigError("machine and bandwidth are two examinations: select one of them")
        if self.path is not None and not self.bandwidth:
            raise ConfigError("path is set, but bandwidth is not: it is the disk to measure")
        if not 1 <= parse_size("block_bytes", self.block_bytes) <= MAX_BLOCK_BYTES:
            raise ConfigError(f"block_bytes={self.block_bytes} is more than 1GiB")
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise ConfigError(f"block_tokens={self.block_tokens} is outside 1..{MAX_BLOCK_TOKENS}")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """A conversation with a running server. Omitted sampling settings take the model's defaults.

    Attributes:
        url: URL of the server, as `longshore serve` prints it.
        api_key: API key of the server.
        model: Name of the model. Default: the first that the server lists.
        system: System message of the conversation.
        temperature: Sampling temperature; 0 always selects the most likely token.
        top_p: Cumulative probability of the tokens to sample from.
        max_tokens: Maximum number of tokens of an answer.
        seed: Makes answers reproducible.
        quick: Send this message, print the answer and exit.
        single: Answer every message by itself, without the ones before: one question per line of a
            pipe.
        timeout_s: Seconds to wait for one answer.
    """

    url: str = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)
    model: Annotated[str | None, Parameter(alias="--model-name")] = None
    system: Annotated[str, Parameter(alias="--system-prompt")] = ""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    quick: Annotated[str | None, Parameter(alias="-q")] = None
    single: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_at_least("max_tokens", self.max_tokens, 1)
        check_duration("timeout_s", self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class CompleteOptions:
    """Texts that a running server continues. Omitted sampling settings take the model's defaults.

    Attributes:
        url: URL of the server, as `longshore serve` prints it.
        api_key: API key of the server.
        model: Name of the model. Default: the first that the server lists.
        max_tokens: Maximum number of tokens of a continuation.
        temperature: Sampling temperature; 0 always selects the most likely token.
        quick: Continue this text and exit.
        timeout_s: Seconds to wait for one continuation.
    """

    url: str = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)
    model: Annotated[str | None, Parameter(alias="--model-name")] = None
    max_tokens: int | None = None
    temperature: float | None = None
    quick: Annotated[str | None, Parameter(alias="-q")] = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_at_least("max_tokens", self.max_tokens, 1)
        check_duration("timeout_s", self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """A file of requests that a running server answers.

    Attributes:
        output: File of the answers. If it has some, the first requests have been answered, and
            only the others are sent. Default: FILE's name with .out.jsonl, beside it.
        url: URL of the server, as `longshore serve` prints it.
        api_key: API key of the server.
        max_concurrency: Maximum number of requests at a time.
        timeout_s: Seconds to wait for one answer.
    """

    output: Annotated[Path | None, Parameter(alias="-o")] = None
    url: str = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)
    max_concurrency: int = 64
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        check_at_least("max_concurrency", self.max_concurrency, 1)
        check_duration("timeout_s", self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class RunBatchOptions:
    """A file of requests that a server of its own answers.

    Attributes:
        input_file: JSON lines in OpenAI's batch format: custom_id, method, url and body.
        output_file: File of the answers. If it has some, only the other requests are sent.
        model: Folder of the model in Hugging Face format, or its id on a model hub.
        max_concurrency: Maximum number of requests at a time.
        timeout_s: Seconds to wait for one answer.
    """

    input_file: Annotated[Path, Parameter(alias="-i")]
    output_file: Annotated[Path, Parameter(alias="-o")]
    model: Annotated[Path, SHOWN_AS_DEMO_MODEL] = DEMO_MODEL_DIR
    max_concurrency: int = 256
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        check_at_least("max_concurrency", self.max_concurrency, 1)
        check_duration("timeout_s", self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class TopOptions:
    """A live view of a running server.

    Attributes:
        url: URL of the server, as `longshore serve` prints it.
        api_key: API key of the server.
        interval_s: Seconds between two updates.
        num_looks: Number of updates after which to exit. Default: run until `q` or Ctrl-C.
        json: Print one line of JSON per update instead.
        timeout_s: Seconds to wait for the server's answer.
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


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(Settings):
    """A quantised copy of a model.

    Attributes:
        to: int4 has a scale for each group of inputs, int8 and fp8 for each output.
        out: Folder to write, which must not exist or be empty.
        group_size: Inputs of a group of int4.
        perplexity: Measure the perplexity of a text before and after.
        text: File with the text (UTF-8), of which up to 8,192 tokens are used. Default: the
            reference of Python's language.
    """

    to: Literal["int8", "int4", "fp8"] = "int8"
    out: Path = Path("quantised")
    group_size: Annotated[int, Meta(ge=16, le=1024, multiple_of=16)] = 128
    perplexity: bool = True
    text: Path | None = None


@with_parameters_of(EngineOptions)
@dataclass(frozen=True, kw_only=True)
class CachePlanOptions(Settings):
    """A plan of a model's KV cache: what will fit. The other settings are those of serving.

    Attributes:
        plan: Plan the KV cache of this model (a folder, a GGUF file or an id on a model hub)
            instead of examining an engine: its groups, their memory, how many tokens fit, and how
            many more because of kv_cache_dtype and decode_context_parallel_size.
        max_steps_in_flight: Maximum number of unanswered plans.
        kv_cache_bytes: Size of the cache of one rank.
    """

    plan: str | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = EngineOptions.max_num_batched_tokens
    max_steps_in_flight: Annotated[int, Meta(ge=1)] = 2
    kv_cache_bytes: Annotated[int, Meta(ge=1)] = 4 << 30
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    dtype: Dtype = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.plan is None:
            return  # the other settings may be meant for another command
        super().__post_init__()
        check_device(self.device)
        check_context_parallel_size(self.decode_context_parallel_size, self.tensor_parallel_size)
