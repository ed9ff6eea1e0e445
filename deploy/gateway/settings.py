"""What users can set of a gateway, of its keys, and of how it divides requests among engines."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from longshore.deploy.gateway.api.prompt_nonces import read_nonces
from longshore.deploy.gateway.api_keys import CacheSharing
from longshore.deploy.gateway.router.policies import PolicyName
from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.settings import MAX_TIMEOUT_S, Duration, Setting, Settings

MAX_AUDIO_S: Final = 24 * 3600
TEMPLATE_INPUT: Final = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"}
)
"""What chat templates get from the request, and not by chat_template_kwargs."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(Settings):
    """How a gateway treats requests, connections and answers."""

    tool_call_parser: Annotated[
        str,
        Setting(
            "Server",
            "Format in which the model writes tool calls: deepseek, gemma4, glm45, harmony, "
            "hermes, kimi_k2, llama, minimax_m2, mistral, nemotron, qwen3_coder, none, the name "
            "of an installed parser, or package.module:Class. auto chooses it by the chat "
            "template.",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Setting(
            "Server",
            "Format in which the model writes its reasoning: gemma4, harmony, think, none, or as "
            "for tool_call_parser.",
        ),
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        str,
        Setting(
            "Server",
            "Variables of the chat template, as a JSON object, for requests whose "
            "chat_template_kwargs or effort does not set them, such as "
            '{"preserve_thinking": true}.',
        ),
    ] = "{}"
    max_forced_calls: Annotated[
        int,
        Meta(ge=1, le=1024),
        Setting(
            "Server",
            "Maximum number of calls in an answer that has to call some tool "
            '(tool_choice="required"). A request may set it to one with parallel_tool_calls.',
        ),
    ] = 16
    max_body_mib: Annotated[
        int, Meta(ge=1), Setting("Server", "Maximum size of a request body without audio.")
    ] = 16
    max_audio_mib: Annotated[
        int, Meta(ge=1), Setting("Server", "Maximum size of an audio file.")
    ] = 25
    max_audio_s: Annotated[
        float,
        Meta(gt=0, le=MAX_AUDIO_S),
        Setting(
            "Server",
            "Maximum duration of an audio file.",
            because="an audio file is held in memory as a whole",
        ),
    ] = 3600.0
    max_live_requests: Annotated[
        int,
        Meta(ge=1),
        Setting(
            "Server",
            "Maximum number of requests running or waiting in all engines; further requests get a "
            "429 with Retry-After. A gateway learns the other gateways' share from the engines "
            "once a second.",
        ),
    ] = 16_384
    cors_allow_origins: Annotated[
        tuple[str, ...] | None,
        Setting(
            "Server",
            "Origins (https://app.example.org) whose pages may use the API from a browser; * "
            "allows all. Default: none.",
        ),
    ] = None
    stored_responses_mib: Annotated[
        int,
        Meta(ge=0),
        Setting(
            "Server",
            "Maximum size of all stored responses of /v1/responses, in the temporary directory; "
            "0: none are stored. Beyond it, the oldest response of the API key that has most is "
            "deleted.",
        ),
    ] = 256
    stored_response_ttl_s: Annotated[
        Duration, Setting("Server", "Seconds after which a stored response is deleted.")
    ] = 86_400.0
    stored_files_mib: Annotated[
        int,
        Meta(ge=0),
        Setting(
            "Server",
            "Maximum size of the files that an API key stores for batches, in the state directory, "
            "with their answers; 0: none are stored.",
        ),
    ] = 512
    stored_file_ttl_s: Annotated[
        Duration, Setting("Server", "Seconds after which a stored file or batch is deleted.")
    ] = 604_800.0
    strict_requests: Annotated[
        bool,
        Setting(
            "Server",
            "Reject requests with unknown fields. Otherwise these fields are ignored, and the "
            "response names them in the header x-longshore-ignored-fields.",
        ),
    ] = False
    prompt_nonces: Annotated[
        tuple[str, ...] | None,
        Setting(
            "Server",
            "Texts of system messages that change with every request, each as ACTION:REGEX: the "
            "cached prefix of a prompt ends where they begin. drop leaves them out of the prompt "
            "and names them in x-longshore-ignored-fields; move puts them at its end. Claude "
            "Code's billing header is always dropped.",
        ),
    ] = None
    access_log: Annotated[
        bool,
        Setting(
            "Operation",
            "Log a line for every HTTP request: method, path, status, durations, numbers of "
            "tokens, name of the API key. Prompts and answers are never logged.",
        ),
    ] = False
    access_log_probes: Annotated[
        bool,
        Setting(
            "Operation",
            "The access log also has the requests of probes and scrapers: /health, /ready, /ping, "
            "/metrics and /load.",
        ),
    ] = False
    metrics_names: Annotated[
        Literal["longshore", "vllm"],
        Setting(
            "Operation",
            "Names of the metrics: longshore, with the few of vLLM's that autoscalers and load "
            "balancers need, or vllm for all that dashboards made for vLLM use (docs/metrics.md).",
        ),
    ] = "longshore"
    idle_sleep_s: Annotated[
        float,
        Meta(ge=0, le=MAX_TIMEOUT_S),
        Setting(
            "Operation",
            "Seconds without a request for a model after which its engines sleep, which frees the "
            "memory of their devices; the next request wakes them. keep_alive of Ollama's API sets "
            "another time. 0: they do not sleep.",
        ),
    ] = 0.0
    unread_timeout_s: Annotated[
        Duration,
        Setting(
            "Operation",
            "Seconds after which a client that reads none of the response data waiting for it is "
            "disconnected.",
        ),
    ] = 60.0
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0, le=MAX_TIMEOUT_S),
        Setting("Operation", "Seconds that running requests have to finish after SIGTERM."),
    ] = 30.0

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of `default_chat_template_kwargs`."""
        variables: dict[str, Any] = msgspec.json.decode(self.default_chat_template_kwargs)
        return variables

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_template_variables()
        for origin in self.cors_allow_origins or ():
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
                raise ConfigError(
                    f"cors_allow_origins={origin!r} is not an origin; use SCHEME://HOST[:PORT] "
                    "without a path, as browsers send it, or * for all"
                )
        read_nonces(self.prompt_nonces or ())

    def _check_template_variables(self) -> None:
        given = self.default_chat_template_kwargs
        try:
            variables = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError):
            variables = None
        if not isinstance(variables, dict):
            raise ConfigError(
                f"default_chat_template_kwargs={shortened(given)!r} is not a JSON object, such as "
                '{"enable_thinking": false}'
            )
        for name in sorted(TEMPLATE_INPUT & variables.keys()):
            raise ConfigError(
                f"default_chat_template_kwargs has {name}, which templates get from the request; "
                "remove it"
            )


@dataclass(frozen=True, kw_only=True)
class KeySettings(Settings):
    """Who may send requests. The keys stay in the process that reads them."""

    api_key: Annotated[
        tuple[str, ...] | None,
        Setting(
            "Server",
            "API keys that clients may use; without any, no key is required. Set it in "
            "LONGSHORE_API_KEY or in a file, because other users can see command lines.",
        ),
    ] = field(default=None, repr=False)
    admin_key_file: Annotated[
        Path | None,
        Setting(
            "Server",
            "File with the key of the paths under /admin, readable by its owner only. Without it, "
            "these paths do not exist.",
        ),
    ] = None
    router_key_file: Annotated[
        Path | None,
        Setting(
            "Server",
            "File with the key of routers that may send kv_transfer_params, readable by its owner "
            "only (docs/disaggregation.md). Without it, no request may.",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        Setting(
            "Server",
            "TOML file with named API keys, their shares and limits (docs/security.md). Only you "
            "may be able to read it. It replaces api_key, and is read when the server starts.",
        ),
    ] = None
    share_prefix_cache: Annotated[
        CacheSharing,
        Setting(
            "Server",
            "Which requests share cached prefixes: those of the same API key, or all. A request "
            "finds out from its cached_tokens and its speed which prefixes are cached. Without "
            "API keys, all requests share.",
        ),
    ] = "key"

    def __post_init__(self) -> None:
        super().__post_init__()
        keys = self.api_key
        if keys is not None and not (keys and all(re.fullmatch(r"[!-~]+", key) for key in keys)):
            raise ConfigError(
                "api_key must be one or more keys of visible ASCII characters without spaces. "
                "Remove it to serve without keys."
            )
        if keys is not None and self.api_key_file is not None:
            raise ConfigError(
                "api_key and api_key_file are both set; move the keys into the file, and unset "
                "api_key (LONGSHORE_API_KEY)"
            )


@dataclass(frozen=True, kw_only=True)
class RoutingSettings(Settings):
    """Which engine gets a request."""

    routing_policy: Annotated[
        PolicyName,
        Setting(
            "Several workers",
            "Which engine gets a prompt, with several replicas: the least loaded one "
            "(least_loaded), the next in turn (round_robin), the one that has its prefix in the "
            "KV cache, unless that is too loaded (prefix_aware), or the same one for all requests "
            "of a session (session_affinity).",
        ),
    ] = "least_loaded"
    routing_session_header: Annotated[
        str,
        Setting(
            "Several workers",
            "Header of requests that names their session, for session_affinity. Without it, "
            "prompt_cache_key and user are used.",
        ),
    ] = "x-session-id"
    routing_index_blocks: Annotated[
        int,
        Meta(ge=1, le=100_000_000),
        Setting(
            "Several workers",
            "Maximum number of KV blocks that each gateway knows of, for prefix_aware; each takes "
            "about 170 bytes.",
        ),
    ] = 1_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[a-z0-9-]{1,64}", self.routing_session_header):
            raise ConfigError(
                f"routing_session_header={self.routing_session_header!r} must be 1 to 64 "
                "lower-case letters, digits and dashes: names of headers are compared in lower case"
            )


@dataclass(frozen=True, kw_only=True)
class SplitSettings(Settings):
    """How requests are divided among prefill and decode engines."""

    disaggregation_min_tokens: Annotated[
        int,
        Meta(ge=1),
        Setting(
            "Several workers",
            "Prompts of which a decode engine has fewer tokens than this to compute are not sent "
            "to a prefill engine.",
        ),
    ] = 64
    disaggregation_max_waiting: Annotated[
        int,
        Meta(ge=0),
        Setting(
            "Several workers",
            "Maximum number of requests that wait at each gateway for memory of a decode engine; "
            "further ones get a 429.",
        ),
    ] = 1024
