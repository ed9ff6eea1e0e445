"""Settings of the gateway process."""

import msgspec

from longshore.deploy.model.embedding import EmbeddingModel
from longshore.deploy.model.folder import AudioInput, SamplingDefaults
from longshore.protocol.transport.channel import Endpoint


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `python -m longshore.deploy.gateway CONFIG.json` needs.

    model:             folder with the tokenizer.
    served_model_name: what clients call the model.
    vocab_size:        token ids at or above it are refused.
    eos_token_ids:     end an answer.
    engines:           where their schedulers take clients.
    number:            of this gateway among those of the deployment.
    siblings:          paths of the private sockets of all of them, this one included.
    listen_fd:         inherited socket, bound already; the gateway listens on it.
    chat_template:     file that replaces the model's own template.
    max_body_bytes:    of a request without audio.
    embedding:         how the model turns texts into vectors; None: it takes no texts.
    audio:             what a speech model takes; None: the model takes text.
    max_audio_bytes, max_audio_s: of a file that is to be transcribed, and of its sound.
    max_live_requests: answers under way, running or waiting; more are answered 429.
    api_keys:          what clients must present; empty: nothing.
    cors_allow_origins: whose pages may use the API from a browser; empty: nobody's.
    drain_timeout_s:   how long live answers may go on after SIGTERM.
    unread_timeout_s:  how long a client may leave its answer unread before it is dropped.
    report_timeout_s:  how long the scheduler may take to describe itself for /engine/report.
    seed:              makes the seeds repeatable that requests without one get.
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
    number: int = 0
    siblings: tuple[str, ...] = ()
    chat_template: str | None = None
    max_body_bytes: int = 16 << 20
    embedding: EmbeddingModel | None = None
    audio: AudioInput | None = None
    max_audio_bytes: int = 25 << 20
    max_audio_s: float = 3600.0
    max_live_requests: int = 16_384
    api_keys: tuple[str, ...] = ()
    cors_allow_origins: tuple[str, ...] = ()
    drain_timeout_s: float = 30.0
    unread_timeout_s: float = 60.0
    report_timeout_s: float = 5.0
    seed: int | None = None
    lifeline_fd: int | None = None
    runtime_dir: str | None = None
    log_level: str = "info"
