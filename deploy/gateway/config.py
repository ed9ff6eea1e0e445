"""Settings of the gateway process."""

from typing import Annotated, Any

import msgspec

from longshore.deploy.gateway.api.transfer_params import TransferAccess
from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.router.config import RoutingConfig
from longshore.deploy.gateway.settings import GatewaySettings, SplitSettings
from longshore.deploy.model.classifier import ClassifierModel
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.deploy.model.folder import AudioInput, SamplingDefaults
from longshore.protocol.commands import EngineMember, LogLevel


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that a gateway serves.

    folder:         with its files.
    tokenizer_file: see `load_tokenizer`.
    name:           in the API.
    aliases:        further names that requests may use.
    vocab_size:     token ids at or above it are rejected.
    eos_token_ids:  token ids that end an answer.
    members:        its engines when the gateway starts.
    chat_template:  file that replaces the model's own template.
    embedding:      how the model pools embeddings; None: it has none.
    classifier:     labels of a model for sequence classification; None: it is another one.
    audio:          audio input of a speech model; None: the model takes text.
    keeps_states:   layers have recurrent states, of which some are kept for later requests.
    routing:        which engine gets a prompt.
    settings:       what users have set for this model.
    """

    folder: str
    tokenizer_file: str | None = None
    name: str
    aliases: tuple[str, ...] = ()
    fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    sampling_defaults: SamplingDefaults
    members: tuple[EngineMember, ...]
    chat_template: str | None = None
    embedding: EmbeddingModel | None = None
    classifier: ClassifierModel | None = None
    audio: AudioInput | None = None
    keeps_states: bool = False
    routing: RoutingConfig = RoutingConfig()
    settings: GatewaySettings = GatewaySettings()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use."""
        return (self.name, *self.aliases)

    @property
    def generates_text(self) -> bool:
        """Whether the model continues text; otherwise chat templates are of no use to it."""
        pools_only = self.embedding is not None and self.embedding.is_only
        return self.audio is None and self.classifier is None and not pools_only


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `python -m longshore.deploy.gateway CONFIG.json` needs.

    models:            that it serves; the first one gets requests that name none.
    awaits_all_engines: accept requests once all engines are ready; False: once one of each model
                       is.
    awaits_engines:    False: accept requests at once; they wait for an engine.
    number:            number of this gateway within the deployment.
    peers:             paths of the private sockets of the gateways on this host, including this
                       one.
    num_elsewhere:     number of gateways on other hosts.
    listen_fd:         inherited socket, already bound; the gateway listens on it.
    max_body_bytes:    limit of a request body without audio.
    max_audio_bytes:   limit of an audio file's size.
    api_keys:          keys that clients may use; empty: no key is required.
    admin_key:         key for /admin; None: these paths do not exist.
    key_usage_fd:      inherited memory in which all gateways count what the keys use; see KeyUsage.
    allowed_hosts:     names of this server in a Host header, beside localhost; `*`: all. Without
                       effect if there are API keys.
    max_stored_bytes:  limit of the stored responses of all gateways; 0: none are stored.
    files_dir:         where files and batches are stored; None: nowhere.
    batch_priority:    of the requests of batches that have none; None: priorities have no effect.
    reasoning_key:     of the ReasoningSeal, in hexadecimal; None: one of this process.
    otlp_traces_endpoint: URL to which spans are exported; None: there are none.
    settings:          what users have set.
    server_settings:   all settings of the server, for /server_info; without secrets.
    split:             how requests are divided among prefill and decode engines.
    transfers:         who may send `kv_transfer_params`.
    report_timeout_s:  seconds that the scheduler has to answer /engine/report.
    seed:              the seeds of requests without a seed are derived from it, to be reproducible.
    """

    models: Annotated[tuple[ModelConfig, ...], msgspec.Meta(min_length=1)]
    listen_fd: int
    awaits_all_engines: bool = True
    awaits_engines: bool = True
    number: int = 0
    peers: tuple[str, ...] = ()
    num_elsewhere: int = 0
    max_body_bytes: int = GatewaySettings.max_body_mib << 20
    max_audio_bytes: int = GatewaySettings.max_audio_mib << 20
    admin_key: str | None = None
    api_keys: tuple[ApiKey, ...] = ()
    key_usage_fd: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_stored_bytes: int = GatewaySettings.stored_responses_mib << 20
    files_dir: str | None = None
    batch_priority: int | None = None
    reasoning_key: str | None = None
    otlp_traces_endpoint: str | None = None
    settings: GatewaySettings = GatewaySettings()
    server_settings: dict[str, Any] = {}
    split: SplitSettings = SplitSettings()
    transfers: TransferAccess = TransferAccess()
    report_timeout_s: float = 5.0
    seed: int | None = None
    lifeline_fd: int | None = None
    runtime_dir: str | None = None
    log_level: LogLevel = "info"
