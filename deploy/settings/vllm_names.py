"""vLLM's names of settings, on the command line and for `LLM`.

A setting that means the same as one of ours is taken under its name. One that asks for what is
always the case is taken with a warning. Every other one is rejected with what to do instead.
docs/coming_from_vllm.md lists them; a test compares.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from longshore.protocol.errors import ConfigError, shortened

logger = logging.getLogger(__name__)

RENAMED: Final = {
    "api_server_count": "gateways",
    "data_parallel_size": "replicas",
    "dcp_kv_cache_interleave_size": "cp_kv_cache_interleave_size",
    "guided_decoding_backend": "structured_output_backend",
    "num_gpu_blocks_override": "num_blocks",
}
"""vLLM's name: ours."""

SPECULATIVE: Final = "speculative_config"

CONFIGS: Final[dict[str, dict[str, str]]] = {
    "kv_events_config": {
        "enable_kv_cache_events": "enable_kv_cache_events",
        "endpoint": "kv_events_endpoint",
        "replay_endpoint": "kv_events_replay_endpoint",
        "buffer_steps": "kv_events_buffer",
        "topic": "kv_events_topic",
    },
    "kv_transfer_config": {
        "kv_connector": "kv_connector",
        "kv_role": "kv_role",
        "kv_connector_extra_config": "kv_connector_config",
        "kv_load_failure_policy": "load_failure_policy",
    },
    SPECULATIVE: {},
}
"""vLLM's settings that are objects: name of a field: our setting."""

CONFIGS_WITHOUT_EFFECT: Final[dict[str, tuple[str, ...]]] = {
    "kv_events_config": ("publisher", "hwm", "max_queue_size"),
    "kv_transfer_config": (
        "engine_id",
        "kv_buffer_device",
        "kv_buffer_size",
        "kv_parallel_size",
        "kv_rank",
    ),
}
"""Fields that are taken with a warning; any other field is rejected."""

CONNECTORS: Final = {
    "DecodeBenchConnector": "decode_bench",
    "ExampleConnector": "example",
    "ExampleHiddenStatesConnector": "hidden_states",
    "FlexKVConnectorV1": "flexkv",
    "LMCacheConnectorV1": "lmcache",
    "LMCacheMPConnector": "lmcache_mp",
    "MoRIIOConnector": "moriio",
    "MooncakeConnector": "mooncake",
    "NixlConnector": "nixl",
    "OffloadingConnector": "offloading",
    "P2pNcclConnector": "p2p_nccl",
    "SharedStorageConnector": "example",
    "SimpleCPUOffloadConnector": "simple_cpu",
}
"""vLLM's name of a connector: ours."""

SHORT_FLAGS: Final = {
    "-O": "--compilation-config",
    "-asc": "--api-server-count",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
}
"""vLLM's short flags that are not ours, beside what they stand for."""

RENAMED_VALUES: Final = {
    ("attention_backend", "FLASHINFER"): "flashinfer",
    ("attention_backend", "TORCH_SDPA"): "torch",
    ("attention_backend", "TRITON_ATTN"): "triton",
    ("dtype", "float"): "float32",
    ("dtype", "half"): "float16",
    ("load_format", "gguf"): "auto",
    ("load_format", "safetensors"): "auto",
    ("kv_cache_dtype", "fp8"): "fp8_e4m3",
    ("quantization", "awq_marlin"): "awq",
    ("quantization", "gpt_oss_mxfp4"): "mxfp4",
    ("quantization", "gptq_marlin"): "gptq",
    ("quantization", "modelopt_fp4"): "modelopt",
    ("structured_output_backend", "guidance"): "llguidance",
}
"""Name and vLLM's value: ours."""

_GRAPHS: Final = "models are not compiled, and the sizes of graphs are chosen; see enforce_eager"
_ALWAYS_SHOWN: Final = "statistics are always collected"

WITHOUT_EFFECT: Final = {
    "compilation_config": _GRAPHS,
    "cuda_graph_sizes": _GRAPHS,
    "disable_custom_all_reduce": "there is no other all-reduce than that of NCCL or Gloo",
    "disable_frontend_multiprocessing": "gateways are processes of their own",
    "disable_log_requests": "requests are logged at level debug only",
    "disable_log_stats": _ALWAYS_SHOWN,
    "disable_uvicorn_access_log": "there is no access log without access_log",
    "enable_auto_tool_choice": "calls are found in every chat with tools",
    "enable_prompt_tokens_details": "usage always has the cached tokens",
    "enable_reasoning": "reasoning is found in every chat",
    "enable_request_id_headers": "every response has a header x-request-id",
    "enable_server_load_tracking": "/load always counts the requests",
    "enable_sleep_mode": "every engine can sleep: use `longshore admin sleep`",
    "max_log_len": "prompts are never logged",
    "max_seq_len_to_capture": _GRAPHS,
    "swap_space": "it has no effect in vLLM either; connectors keep KV in host memory",
    "trust_remote_code": "code from model folders is never run",
}
"""Name: why it has no effect."""

FLAGS_WITHOUT_VALUE: Final = frozenset(
    {
        "disable_custom_all_reduce",
        "disable_frontend_multiprocessing",
        "disable_log_requests",
        "disable_log_stats",
        "disable_uvicorn_access_log",
        "enable_auto_tool_choice",
        "enable_prompt_tokens_details",
        "enable_reasoning",
        "enable_request_id_headers",
        "enable_server_load_tracking",
        "enable_sleep_mode",
        "trust_remote_code",
    }
)
"""Those of WITHOUT_EFFECT that are switches on the command line."""

_FOLDER: Final = "it is that of the model folder"
_ROLE: Final = "the model folder says what the model computes"
_HOSTS: Final = "several hosts are served with a topology file (docs/topology.md)"
_PROXY: Final = "use a reverse proxy in front of the server (docs/security.md)"
_LORA: Final = "LoRA adapters are not supported; merge them into the weights"
_ORIGINS: Final = "use cors_allow_origins=ORIGIN, several times for several origins"
_REVISION: Final = "use the model OWNER/NAME@REVISION"

REJECTED: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "additional_config": (({},), "there are no other settings"),
    "allowed_headers": ((), _ORIGINS),
    "allowed_local_media_path": (("",), "audio is sent in the request"),
    "allowed_methods": ((), _ORIGINS),
    "allowed_origins": ((), _ORIGINS),
    "calculate_kv_scales": (
        (False,),
        "scales of keys and values are those of the checkpoint, or 1",
    ),
    "chat_template_content_format": (("auto", "string"), "templates get the text of messages"),
    "code_revision": ((), "code from model folders is never run"),
    "collect_detailed_traces": ((), "spans have the times of queue, prefill, decode and transfers"),
    "config_format": (("auto", "hf"), _FOLDER),
    "convert": (("auto", "none", "embed"), _ROLE),
    "cpu_offload_gb": ((0,), "weights stay on the device; tensor_parallel_size splits them"),
    "data_parallel_address": ((), _HOSTS),
    "data_parallel_backend": (("mp",), _HOSTS),
    "data_parallel_rank": ((), _HOSTS),
    "data_parallel_size_local": ((), _HOSTS),
    "disable_hybrid_kv_cache_manager": ((False,), "all KV cache groups share one pool"),
    "disable_sliding_window": ((False,), "the model's windows are used"),
    "distributed_executor_backend": (("mp", "uni"), "workers are processes of one machine"),
    "download_dir": ((), "set HF_HOME"),
    "ec_transfer_config": ((), "use ec_connector, ec_role and ec_connector_config"),
    "enable_eplb": ((False,), "experts stay on their workers"),
    "enable_expert_parallel": ((False,), "tensor_parallel_size splits experts"),
    "enable_force_include_usage": ((False,), "use stream_options in requests"),
    "enable_log_outputs": ((False,), "answers are never logged"),
    "enable_log_requests": ((False,), "use access_log, or log_level=debug"),
    "enable_lora": ((False,), _LORA),
    "enable_prompt_embeds": ((False,), "pass the text or the token ids"),
    "exclude_tools_when_tool_choice_none": (
        (False,),
        "the prompt shows the tools, so that its cached prefix can be used",
    ),
    "generation_config": (("auto",), _FOLDER),
    "headless": ((False,), _HOSTS),
    "hf_config_path": ((), _FOLDER),
    "hf_overrides": (({},), "change config.json of the model folder"),
    "hf_token": ((), "set HF_TOKEN"),
    "ignore_patterns": ((), "only the files that are needed are downloaded"),
    "kv_cache_memory_bytes": ((), "use num_blocks; `longshore doctor --plan MODEL` converts"),
    "kv_offloading_backend": ((), "use kv_connector=offloading and kv_connector_config"),
    "kv_offloading_size": ((), "use kv_connector=offloading and kv_connector_config"),
    "limit_mm_per_prompt": (({},), "models with images are not supported"),
    "log_config_file": ((), "use log_level and log_format"),
    "logits_processors": (([],), "samplers run in the worker process, which takes no functions"),
    "lora_modules": ((), _LORA),
    "max_logprobs": ((20,), "the limit is 20"),
    "max_long_partial_prefills": ((1,), "long_prefill_token_threshold lets prompts run together"),
    "max_lora_rank": ((16,), _LORA),
    "max_loras": ((1,), _LORA),
    "max_num_partial_prefills": ((1,), "long_prefill_token_threshold lets prompts run together"),
    "middleware": (([],), _PROXY),
    "mm_processor_kwargs": (({},), "models with images are not supported"),
    "model_impl": (("auto", "vllm"), "models run with the kernels here"),
    "model_loader_extra_config": (({},), "weights are read from safetensors files"),
    "nnodes": ((1,), _HOSTS),
    "num_scheduler_steps": ((1,), "async_scheduling keeps the device busy between steps"),
    "override_generation_config": (({},), "change generation_config.json of the model folder"),
    "override_pooler_config": (
        (),
        "pooling settings are those of the model folder; requests can change them",
    ),
    "pooler_config": (
        (),
        "pooling settings are those of the model folder; requests can change them",
    ),
    "prefix_caching_hash_algo": (("sha256",), "block hashes are seeded sha256"),
    "reasoning_parser_plugin": (("",), "use reasoning_parser=package.module:Class"),
    "response_role": (("assistant",), "answers have the role assistant"),
    "return_tokens_as_token_ids": ((False,), "use return_tokens_as_token_ids in requests"),
    "revision": ((), _REVISION),
    "root_path": (("",), _PROXY),
    "rope_scaling": ((), "change config.json of the model folder"),
    "rope_theta": ((), "change config.json of the model folder"),
    "runner": (("auto", "generate", "pooling"), _ROLE),
    "scheduler_cls": ((), "use scheduling_policy=package.module:Class"),
    "skip_tokenizer_init": ((False,), "pass prompts as token ids, and detokenize=False"),
    "ssl_ca_certs": ((), _PROXY),
    "ssl_certfile": ((), _PROXY),
    "ssl_keyfile": ((), _PROXY),
    "stream_interval": ((1,), "tokens are sent as they are computed"),
    "structured_outputs_config": (({},), "use structured_output_backend"),
    "task": (("auto", "generate", "embed", "embedding", "score", "classify"), _ROLE),
    "tokenizer": ((), _FOLDER),
    "tokenizer_mode": (("auto", "hf"), "tokenizer.json of the model folder is used"),
    "tokenizer_revision": ((), _REVISION),
    "tool_parser_plugin": (("",), "use tool_call_parser=package.module:Class"),
    "tool_server": ((), "clients run the tools"),
    "trust_request_chat_template": ((False,), "use chat_template=FILE; a request cannot have one"),
    "uvicorn_log_level": ((), "use log_level"),
    "worker_cls": (("auto",), "workers are processes of Longshore"),
    "worker_extension_cls": (("",), "workers are processes of Longshore"),
}
"""Name: values that are the case anyway, beside None, and what to do instead of others."""


def translate_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with vLLM's names, by ours. Raises ConfigError for what does not exist here."""
    translated: dict[str, Any] = {}

    def add(own: str, value: Any, shown: str) -> None:
        if own in translated or (own != shown and own in settings):
            raise ConfigError(f"{shown} and {own} are the same setting; remove one of them")
        translated[own] = value

    for name, value in settings.items():
        if name in _KNOWN:
            _check(name, value, shown=name)
        elif name in CONFIGS:
            for own, each in _settings_of(name, value, shown=name).items():
                add(own, each, name)
        else:
            own = RENAMED.get(name, name)
            if isinstance(value, str):
                value = RENAMED_VALUES.get((own, value), value)
            add(own, value, name)
    return translated


def translate_flags(tokens: Sequence[str]) -> list[str]:
    """Translate the arguments of `serve` in the same way. Underscores in flags become hyphens."""
    translated: list[str] = []
    configs: dict[str, dict[str, Any]] = {}
    rest = list(tokens)
    # Only then are further words after --served-model-name more names, as in vLLM.
    has_model = len(rest) > 1 and rest[0] == "serve" and not rest[1].startswith("-")
    while rest:
        token = rest.pop(0)
        flag, equals, value = _without_short_flag(token).partition("=")
        if not flag.startswith("--") or flag == "--":
            translated.append(token)
            continue
        name, _, field = flag[2:].replace("-", "_").partition(".")
        setting = name[3:] if name.startswith("no_") and name[3:] in _KNOWN else name
        if setting in _KNOWN or setting in CONFIGS:
            is_switch = setting in FLAGS_WITHOUT_VALUE or False in REJECTED.get(setting, ((),))[0]
            if not is_switch and not equals:
                value = rest.pop(0) if rest else ""
            if setting in CONFIGS:
                _merge(configs.setdefault(setting, {}), field, value, shown=_flag(setting))
            else:
                _check(setting, value if not is_switch else name == setting, shown=_flag(setting))
            continue
        own = RENAMED.get(name, name)
        if own == "served_model_name" and has_model and not equals:
            names = list(itertools.takewhile(lambda each: not each.startswith("-"), rest))
            translated += [f"{_flag(own)}={each}" for each in names] or [_flag(own)]
            del rest[: len(names)]
            continue
        if not equals and rest and (own, rest[0]) in RENAMED_VALUES:
            rest[0] = RENAMED_VALUES[own, rest[0]]
        translated.append(f"{_flag(own)}{equals}{RENAMED_VALUES.get((own, value), value)}")
    for name, config in configs.items():
        for own, value in _settings_of(name, config, shown=_flag(name)).items():
            flag = _flag(f"no_{own}" if value is False else own)
            translated.append(flag if isinstance(value, bool) else f"{flag}={value}")
    return translated


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _without_short_flag(token: str) -> str:
    if token.startswith("-O") and token != "-O":  # -O3
        return f"--compilation-config={token[2:]}"
    flag, equals, value = token.partition("=")
    return f"{SHORT_FLAGS.get(flag, flag)}{equals}{value}"


def _merge(config: dict[str, Any], path: str, text: str, shown: str) -> None:
    """Add what a flag gives: a whole object as JSON, or the value at `path`, as in
    `--kv-transfer-config.kv_role kv_both`."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        if not path:
            raise ConfigError(f"{shown} is not a JSON object: {shortened(text)}") from None
        value = text
    *parents, last = path.split(".") if path else [""]
    for name in parents:
        config = config.setdefault(name, {})
    if path:
        config[last] = value
    elif isinstance(value, dict):
        config.update(value)
    else:
        raise ConfigError(f"{shown} is not a JSON object: {shortened(text)}")


def _settings_of(name: str, config: Any, *, shown: str) -> dict[str, Any]:
    """Our settings for one of CONFIGS. Raises ConfigError for fields that do not exist here."""
    if config is None:
        return {}
    if name == SPECULATIVE:  # one setting, with vLLM's fields
        return {name: config if isinstance(config, str) else msgspec.json.encode(config).decode()}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{shown} must be a dict with the fields {', '.join(CONFIGS[name])}")
    settings: dict[str, Any] = {}
    config = dict(config)
    module = config.pop("kv_connector_module_path", None)
    for field, value in config.items():
        if value is None:
            continue
        if field in CONFIGS_WITHOUT_EFFECT[name]:
            logger.warning("%s: %s has no effect", shown, field)
        elif field in CONFIGS[name]:
            settings[CONFIGS[name][field]] = value
        else:
            known = ", ".join(CONFIGS[name])
            raise ConfigError(f"{shown}: {field} is not supported; the fields are {known}")
    connector = settings.get("kv_connector")
    if module is not None:
        settings["kv_connector"] = f"{module}:{connector}"
    elif connector is not None:
        settings["kv_connector"] = CONNECTORS.get(connector, connector)
    if "kv_connector_config" in settings:
        settings["kv_connector_config"] = msgspec.json.encode(
            settings["kv_connector_config"]
        ).decode()
    return settings


def _check(name: str, value: object, *, shown: str) -> None:
    """name: of WITHOUT_EFFECT or REJECTED; `shown` in messages. value: on the command line a text,
    or whether a switch is on. Raises ConfigError if it asks for what does not exist here."""
    if name in WITHOUT_EFFECT:
        if value not in (None, False):
            logger.warning("%s has no effect: %s", shown, WITHOUT_EFFECT[name])
        return
    neutral, advice = REJECTED[name]
    if value is not None and str(value) not in map(str, neutral):
        raise ConfigError(f"{shown} is not supported: {advice}")


_KNOWN: Final = REJECTED.keys() | WITHOUT_EFFECT.keys()
