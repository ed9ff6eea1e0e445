"""The settings that a user gives on the command line or to `LLM`, before defaults are derived."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

from longshore.connectors.settings import ConnectorSettings
from longshore.deploy.gateway.settings import (
    GatewaySettings,
    KeySettings,
    RoutingSettings,
    SplitSettings,
)
from longshore.deploy.settings.checks import check_device
from longshore.deploy.settings.parameters import with_parameters
from longshore.deploy.settings.vllm_names import translate_settings
from longshore.deploy.supervisor.log_lines import LogFormat
from longshore.deploy.supervisor.settings import RestartSettings
from longshore.protocol.commands import LogLevel, Role
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import KVEventsSettings
from longshore.protocol.settings import Setting
from longshore.scheduler.config import CacheSettings, SchedulerSettings
from longshore.scheduler.process.settings import InspectionSettings, StructuredOutputSettings
from longshore.worker.config import RankSettings, WorkerSettings

Launcher: TypeAlias = Literal["ray"]
SPLIT_ONLY: Final = tuple(each.name for each in fields(SplitSettings))
"""Settings that need engines with the roles prefill and decode."""

MAX_MODEL_NAMES: Final = 64
MAX_PROCESSES: Final = 64  # for replicas and for gateways, separately


@with_parameters
@dataclass(frozen=True, kw_only=True)
class EngineOptions(
    WorkerSettings,
    RankSettings,
    CacheSettings,
    SchedulerSettings,
    StructuredOutputSettings,
    InspectionSettings,
    KVEventsSettings,
    ConnectorSettings,
):
    """One engine: a scheduler and its workers. Raises ConfigError naming an invalid setting."""

    block_size: Annotated[
        int | None,
        Setting(
            "KV cache",
            "Tokens per block, a power of two. Default: 16; 256 for models that only have state "
            "layers.",
        ),
    ] = None
    quantization: Annotated[
        str | None,
        Setting(
            "Model",
            "How the weights in the model's folder are quantised, such as awq or fp8; the start "
            "fails if that is not so. Not needed, because the folder says it.",
        ),
    ] = None
    max_num_encoder_input_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 24)] | None,
        Setting(
            "Model",
            "Maximum number of tokens that the encoder of a speech model produces per step; "
            "limits how many requests can start in a step. Default: the tokens of one request.",
        ),
    ] = None
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 26)] | None,
        Setting(
            "Model",
            "Maximum number of tokens of a request, prompt and output together. Default: the "
            "model's own limit, or what num_blocks can hold if that is less.",
            is_count=True,
        ),
    ] = None
    scheduling_policy: Annotated[
        str | None,
        Setting(
            "Scheduling",
            "Order in which requests are scheduled: fcfs by arrival, priority by the request's "
            "priority, continuum by the first arrival of the request's job, fair by the shares of "
            "API keys, or an installed policy given by name or as package.module:Class. Default: "
            "fair for a key file with several keys, else fcfs.",
        ),
    ] = None
    async_scheduling: Annotated[
        bool | None,
        Setting(
            "Scheduling",
            "Plan a step before the tokens of the previous step are known. Default: on, unless "
            "there are several pipeline stages, which overlap steps anyway, or drafts.",
        ),
    ] = None
    kv_events_endpoint: Annotated[
        str | None,
        Setting(
            "KV events",
            "Address of the events, ipc://PATH or tcp://ADDRESS:PORT; further engines use the "
            "following ports, or PATH with their numbers. Default: a socket in the deployment's "
            "private directory, shown in the log.",
        ),
    ] = None
    kv_events_replay_endpoint: Annotated[
        str | None,
        Setting(
            "KV events", "Address for requests of missed events and of snapshots, in the same form."
        ),
    ] = None
    enable_return_routed_experts: Annotated[
        bool,
        Setting(
            "Model",
            "Answers of a mixture of experts have the experts that were chosen for each token. "
            "Needs host memory for the experts of all tokens in the KV cache, and excludes "
            "pipeline_parallel_size, decode_context_parallel_size and kv_connector.",
        ),
    ] = False
    seed: Annotated[
        int | None,
        Setting(
            "Model",
            "Derive the seeds of requests without a seed from this one, so that they are "
            "reproducible. Default: random seeds.",
        ),
    ] = None
    state_dir: Annotated[
        Path | None,
        Setting(
            "Operation",
            "Directory of what must survive a restart: the seed of block hashes. It is created "
            "with mode 0700 if it is missing. Deployments that share stored KV need the same one. "
            "Default: longshore in XDG_STATE_HOME, or in ~/.local/state.",
        ),
    ] = None
    kv_adoption: Annotated[
        bool,
        Setting(
            "Operation",
            "After the death of a worker, keep the KV that it had computed: the KV cache is "
            "memory that outlives the process. CPU workers only; others compute it again.",
        ),
    ] = True
    otlp_traces_endpoint: Annotated[
        str | None,
        Setting(
            "Operation",
            "URL of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces, that gets "
            "the spans of each request, as OTLP over HTTP (docs/spans.md). Needs the extra otel. "
            "Default: no spans.",
        ),
    ] = None
    log_level: Annotated[LogLevel, Setting("Operation", "Lowest level of log lines to show.")] = (
        "info"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)
        if self.num_ranks > 1 and ":" in self.device:
            raise ConfigError(
                f"device={self.device!r} selects one GPU, but tensor_parallel_size="
                f"{self.tensor_parallel_size} and pipeline_parallel_size="
                f"{self.pipeline_parallel_size} need {self.num_ranks}. Use device='cuda', and "
                "select GPUs with CUDA_VISIBLE_DEVICES."
            )
        if self.async_scheduling and self.pipeline_parallel_size > 1:
            raise ConfigError(
                "async_scheduling is not supported with pipeline_parallel_size="
                f"{self.pipeline_parallel_size}, because the first stage gets the tokens of a step "
                "with the next plan. Remove async_scheduling; one step per stage runs at a time "
                "anyway."
            )
        if self.async_scheduling and self.speculative_config is not None:
            raise ConfigError(
                "async_scheduling is not supported with speculative_config yet: a step is planned "
                "when the drafts of the one before it are known. Remove async_scheduling."
            )
        if self.kv_connector is None and self.kv_role != "kv_both":
            raise ConfigError(
                f"kv_role={self.kv_role!r} is set, but kv_connector is not, so it has no effect. "
                "Set kv_connector, or remove kv_role."
            )
        if self.preemption_mode != "recompute" and self.kv_connector is None:
            raise ConfigError(
                f"preemption_mode={self.preemption_mode} needs a connector that keeps KV in host "
                "memory, and kv_connector is not set. Use kv_connector=offloading, or "
                "preemption_mode=recompute."
            )
        if self.enable_return_routed_experts:
            self._check_routed_experts()
        self._check_kv_events()

    def _check_routed_experts(self) -> None:
        for name, neutral, why in (
            ("pipeline_parallel_size", 1, "no stage knows the experts of all layers"),
            ("decode_context_parallel_size", 1, "no worker has the slots of all tokens"),
            ("kv_connector", None, "blocks that are loaded do not have their tokens' experts"),
        ):
            if (value := getattr(self, name)) != neutral:
                raise ConfigError(
                    f"enable_return_routed_experts is not supported with {name}={value}: {why}. "
                    "Remove one of them."
                )

    def _check_kv_events(self) -> None:
        if self.enable_kv_cache_events:
            if not self.enable_prefix_caching:
                raise ConfigError(
                    "enable_kv_cache_events needs enable_prefix_caching: the events are about "
                    "cached blocks"
                )
            return
        for name in ("endpoint", "replay_endpoint"):
            if getattr(self, f"kv_events_{name}") is not None:
                raise ConfigError(f"kv_events_{name} is set, but enable_kv_cache_events is not")

    @property
    def max_steps_in_flight(self) -> int:
        """Limit of unanswered plans: one per pipeline stage; else 2, or 1 if not asynchronous."""
        if self.pipeline_parallel_size > 1:
            return self.pipeline_parallel_size
        has_drafts = self.speculative_config is not None
        return 1 if self.async_scheduling is False or has_drafts else 2


@with_parameters
@dataclass(frozen=True, kw_only=True)
class ServeOptions(
    RestartSettings, GatewaySettings, KeySettings, RoutingSettings, SplitSettings, EngineOptions
):
    """A deployment: engines with an OpenAI-compatible API."""

    prefill: Annotated[
        int,
        Meta(ge=0, le=MAX_PROCESSES),
        Setting(
            "Several workers",
            "Number of engines that compute prompts and first tokens only, for the decode "
            "engines. They take GPUs before these, or share the CPU. Default: all engines compute "
            "whole requests.",
        ),
    ] = 0
    decode: Annotated[
        int,
        Meta(ge=0, le=MAX_PROCESSES),
        Setting(
            "Several workers",
            "Number of engines that compute all other tokens; they copy the KV of the prompts "
            "from the prefill engines through kv_connector, which is nixl by default.",
        ),
    ] = 0
    topology: Annotated[
        Path | None,
        Setting(
            "Several hosts",
            "TOML file that describes engines and gateways on one or several nodes "
            "(docs/topology.md). All other settings are in the file then.",
        ),
    ] = None
    launcher: Annotated[
        Launcher | None,
        Setting(
            "Several hosts",
            "What starts the nodes of a topology: ray, on the hosts of its cluster. Default: "
            "nothing; a topology of one node is started here.",
        ),
    ] = None
    replicas: Annotated[
        int,
        Meta(ge=1, le=MAX_PROCESSES),
        Setting(
            "Several workers",
            "Number of engines with the same model and settings, each with its own scheduler and "
            "workers. Replicas use consecutive GPUs, or share the CPU and its memory.",
        ),
    ] = 1
    gateways: Annotated[
        int,
        Meta(ge=1, le=MAX_PROCESSES),
        Setting(
            "Server",
            "Number of processes that serve the port. Raise it if one gateway uses a whole core.",
        ),
    ] = 1
    host: Annotated[str, Setting("Server", "Address to listen on; 0.0.0.0 is every interface.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, Meta(ge=0, le=65535), Setting("Server", "Port to listen on; 0 selects a free one.")
    ] = 8000
    served_model_name: Annotated[
        tuple[str, ...] | None,
        Setting(
            "Server",
            "Model names in the API. Responses have the first one, requests may use any. Default: "
            "the name of the model's folder, or its id on the hub.",
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        Setting("Server", "File with a Jinja chat template that replaces the model's own."),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...] | None,
        Setting(
            "Server",
            "Names of this server that requests without API keys may have in their Host header, "
            "beside localhost, IP addresses, host and the machine's own name; * allows all. "
            "Others get a 403: a page of another site could send them (docs/security.md).",
        ),
    ] = None
    log_format: Annotated[
        LogFormat,
        Setting(
            "Operation", "Format of the lines on standard error: text, or one JSON object per line."
        ),
    ] = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.launcher is not None and self.topology is None:
            raise ConfigError(
                f"launcher={self.launcher} starts the nodes of a topology, and topology is not "
                "set. Set it, or remove launcher."
            )
        self._check_roles()
        self._check_routing()
        num_engines = len(self.roles)
        if num_engines > 1 and ":" in self.device:
            settings = f"prefill={self.prefill} and decode={self.decode}"
            raise ConfigError(
                f"device={self.device!r} selects one GPU, but "
                f"{settings if self.prefill else f'replicas={self.replicas}'} need "
                f"{self.num_ranks * num_engines}. Use device='cuda', and select GPUs with "
                "CUDA_VISIBLE_DEVICES."
            )
        if self.idle_sleep_s and self.gateways > 1:
            raise ConfigError(
                f"idle_sleep_s={self.idle_sleep_s:g} needs one gateway, which knows all requests, "
                f"and gateways={self.gateways}. Remove one of them."
            )
        names = self.served_model_name
        if names is not None and not (0 < len(names) <= MAX_MODEL_NAMES and all(names)):
            raise ConfigError(
                f"served_model_name must be 1 to {MAX_MODEL_NAMES} names, none of them empty. "
                "Remove it to use the name of the model's folder."
            )
        for name in self.allowed_hosts or ():
            if name != "*" and not re.fullmatch(r"[\w.-]+", name, re.ASCII):
                raise ConfigError(
                    f"allowed_hosts={name!r} is not the name of a host; use a name such as "
                    "llm.example.org without scheme, port and path, or * for all"
                )

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of each engine, in the order of their numbers."""
        numbers: dict[Role, int] = {"unified": self.replicas}
        if self.prefill:
            numbers = {"prefill": self.prefill, "decode": self.decode}
        return tuple(role for role, number in numbers.items() for _ in range(number))

    def _check_roles(self) -> None:
        if bool(self.prefill) != bool(self.decode):
            missing = "decode" if self.prefill else "prefill"
            raise ConfigError(
                f"prefill={self.prefill} and decode={self.decode}: both kinds of engines are "
                f"needed. Set {missing} to 1 or more, or remove both."
            )
        if self.prefill and self.replicas > 1:
            raise ConfigError(
                f"replicas={self.replicas} are engines for whole requests, and prefill="
                f"{self.prefill} and decode={self.decode} are not. Remove replicas."
            )
        if self.prefill and self.kv_role != "kv_both":
            raise ConfigError(
                f"kv_role={self.kv_role!r} is not supported with prefill={self.prefill} and "
                f"decode={self.decode}: the role of an engine says whether it sends or receives "
                "KV. Remove kv_role."
            )
        for name in () if self.prefill or self.topology is not None else SPLIT_ONLY:
            if getattr(self, name) != getattr(ServeOptions, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} is set, but prefill is not, so it has no "
                    f"effect. Set prefill and decode, or remove {name}."
                )

    def _check_routing(self) -> None:
        if self.routing_policy != "prefix_aware":
            return
        if not self.enable_prefix_caching:
            raise ConfigError("routing_policy=prefix_aware needs enable_prefix_caching")
        if (self.kv_events_format, self.kv_events_hashes) != ("arrays", "bytes"):
            raise ConfigError(
                f"routing_policy=prefix_aware reads KV events as arrays with whole hashes, but "
                f"kv_events_format={self.kv_events_format} and kv_events_hashes="
                f"{self.kv_events_hashes}. Remove these settings, or use another policy."
            )


def engine_options(settings: dict[str, Any]) -> EngineOptions:
    """EngineOptions from keyword arguments, also with vLLM's names. A setting in JSON may be a
    dictionary. Raises ConfigError, with the known names, for an unknown one."""
    known = sorted(setting.name for setting in fields(EngineOptions))
    of_server = {each.name: each.default for each in fields(ServeOptions) if each.name not in known}
    given: dict[str, Any] = {}
    for name, value in translate_settings(settings).items():
        if name in known:
            given[name] = json.dumps(value) if isinstance(value, Mapping) else value
        elif name not in of_server:
            raise ConfigError(f"{name} is not an engine setting; known are {', '.join(known)}")
        elif value != of_server[name]:
            raise ConfigError(
                f"{name} is a setting of `longshore serve`, not of an engine; remove it"
            )
    return EngineOptions(**given)
