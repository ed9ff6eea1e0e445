"""Settings of the gateway process."""

import msgspec

from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.engines.split_requests import SplitConfig
from longshore.deploy.gateway.openai.transfer_params import TransferAccess
from longshore.deploy.gateway.router.config import RoutingConfig
from longshore.deploy.model.classifier import ClassifierModel
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.deploy.model.folder import AudioInput, SamplingDefaults
from longshore.protocol.commands import EngineMember, Role
from longshore.protocol.transport.channel import Endpoint


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `python -m longshore.deploy.gateway CONFIG.json` needs.

    model:             folder with the tokenizer.
    served_model_name: name of the model in the API.
    model_aliases:     further names that requests may use.
    vocab_size:        token ids at or above it are rejected.
    eos_token_ids:     token ids that end an answer.
    engines:           endpoints of the schedulers.
    roles:             of the engines, by number; empty: all are unified.
    members:           the engines now, if some were added or removed since the start; None: those
                       of `engines`.
    awaits_all_engines: accept requests once all engines are ready; False: once one is.
    awaits_engines:    False: accept requests at once; they wait for an engine.
    number:            number of this gateway within the deployment.
    peers:             paths of the private sockets of the gateways on this host, including this
                       one.
    num_elsewhere:     number of gateways on other hosts.
    listen_fd:         inherited socket, already bound; the gateway listens on it.
    chat_template:     file that replaces the model's own template.
    tool_call_parser, reasoning_parser: names of parsers, `auto` or `none`.
    max_body_bytes:    limit of a request body without audio.
    embedding:         how the model pools embeddings; None: it has none.
    classifier:        labels of a model for sequence classification; None: it is another one.
    audio:             audio input of a speech model; None: the model takes text.
    max_audio_bytes, max_audio_s: limits of an audio file's size and duration.
    max_live_requests: limit of running and waiting requests; others get a 429.
    api_keys:          keys that clients may use; empty: no key is required.
    admin_key:         key for /admin; None: these paths do not exist.
    key_usage_fd:      inherited memory in which all gateways count what the keys use; see KeyUsage.
    allowed_hosts:     names of this server in a Host header, beside localhost; `*`: all. Without
                       effect if there are API keys.
    cors_allow_origins: origins whose pages may use the API from a browser; empty: none.
    max_stored_bytes:  limit of the stored responses of all gateways; 0: none are stored.
    stored_response_ttl_s: seconds after which a stored response is deleted.
    access_log:        log a line at info for every HTTP request.
    vllm_metrics:      return the metrics under vLLM's names, too.
    strict_requests:   reject unknown fields of requests instead of ignoring them.
    routing:           which engine gets a prompt.
    split:             how requests are divided among prefill and decode engines.
    transfers:         who may send `kv_transfer_params`.
    drain_timeout_s:   seconds that running requests have to finish after SIGTERM.
    unread_timeout_s:  seconds after which a client that reads nothing of a response is
                       disconnected.
    report_timeout_s:  seconds that the scheduler has to answer /engine/report.
    seed:              the seeds of requests without a seed are derived from it, to be reproducible.
    """

    model: str
    served_model_name: str
    model_fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    sampling_defaults: SamplingDefaults
    engines: tuple[Endpoint, ...]
    listen_fd: int
    roles: tuple[Role, ...] = ()
    members: tuple[EngineMember, ...] | None = None
    model_aliases: tuple[str, ...] = ()
    awaits_all_engines: bool = True
    awaits_engines: bool = True
    number: int = 0
    peers: tuple[str, ...] = ()
    num_elsewhere: int = 0
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_body_bytes: int = 16 << 20
    embedding: EmbeddingModel | None = None
    classifier: ClassifierModel | None = None
    audio: AudioInput | None = None
    max_audio_bytes: int = 25 << 20
    max_audio_s: float = 3600.0
    max_live_requests: int = 16_384
    admin_key: str | None = None
    api_keys: tuple[ApiKey, ...] = ()
    key_usage_fd: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_allow_origins: tuple[str, ...] = ()
    max_stored_bytes: int = 256 << 20
    stored_response_ttl_s: float = 86_400.0
    access_log: bool = False
    vllm_metrics: bool = False
    strict_requests: bool = False
    routing: RoutingConfig = RoutingConfig()
    split: SplitConfig = SplitConfig()
    transfers: TransferAccess = TransferAccess()
    drain_timeout_s: float = 30.0
    unread_timeout_s: float = 60.0
    report_timeout_s: float = 5.0
    seed: int | None = None
    lifeline_fd: int | None = None
    runtime_dir: str | None = None
    log_level: str = "info"

    @property
    def current_members(self) -> tuple[EngineMember, ...]:
        """The engines to begin with."""
        if self.members is not None:
            return self.members
        prefix = self.routing.prefix
        return tuple(
            EngineMember(
                number,
                self.roles[number] if self.roles else "unified",
                clients,
                None if prefix is None else prefix.events[number],
            )
            for number, clients in enumerate(self.engines)
        )

    @property
    def generates_text(self) -> bool:
        """Whether the model continues text; otherwise chat templates are of no use to it."""
        pools_only = self.embedding is not None and self.embedding.is_only
        return self.audio is None and self.classifier is None and not pools_only
