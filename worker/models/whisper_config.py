"""Whisper (Radford et al., 2022): an audio encoder, and a decoder that attends to its tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from longshore.protocol.kv_cache_spec import CrossAttentionSpec, KVCacheSpec
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes, cache_name
from longshore.worker.models.decoder_config import (
    DecoderConfig,
    checkpoint_dtype,
    read_activation,
    reject_uncomputed,
)
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.rope_config import DEFAULT_THETA, DefaultRope
from longshore.worker.models.tensor_shapes import Shapes, layer_norm, linear, mlp

NORM_EPS: Final = 1e-5
"""Not in config.json."""

FRAMES_PER_TOKEN: Final = 2
"""The second convolution of the encoder has stride 2."""
KERNEL_WIDTH: Final = 3
"""Frames that a convolution of the encoder covers."""


@dataclass(frozen=True, kw_only=True)
class AudioSettings:
    """Settings of the log-mel spectrogram; lengths in samples.

    hop_length:    distance between frames.
    window_length: length of a frame.
    num_samples:   length to which all audio is padded.
    """

    num_mel_bins: int
    sampling_rate: int
    hop_length: int
    window_length: int
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class WhisperConfig(DecoderConfig):
    """The fields of DecoderConfig are the decoder's. Positions are learned; there is no rope."""

    model_type = "whisper"
    model = "longshore.worker.models.whisper:Whisper"
    stored_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens.": "model.decoder.embed_tokens.",
        "model.layers.": "model.decoder.layers.",
        "model.norm.": "model.decoder.layer_norm.",
        "lm_head.": "proj_out.",
    }

    num_encoder_tokens: int
    num_encoder_layers: int
    num_encoder_heads: int
    encoder_intermediate_size: int
    audio: AudioSettings

    def tensor_shapes(self) -> Shapes:
        size, encoder = self.hidden_size, "model.encoder"
        shapes: Shapes = {
            **super().tensor_shapes(),
            "model.decoder.embed_positions.weight": (self.max_position_embeddings, size),
            f"{encoder}.conv1.weight": (size, self.audio.num_mel_bins, KERNEL_WIDTH),
            f"{encoder}.conv1.bias": (size,),
            f"{encoder}.conv2.weight": (size, size, KERNEL_WIDTH),
            f"{encoder}.conv2.bias": (size,),
            f"{encoder}.embed_positions.weight": (self.num_encoder_tokens, size),
            **layer_norm(f"{encoder}.layer_norm", size),
        }
        for layer in range(self.num_encoder_layers):
            name = f"{encoder}.layers.{layer}"
            shapes |= self._attention(name, "self_attn")
            shapes |= layer_norm(f"{name}.final_layer_norm", size)
            shapes |= mlp(name, size, self.encoder_intermediate_size)
        return shapes

    def norm_shapes(self) -> Shapes:
        return layer_norm("model.norm", self.hidden_size)

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        return {
            **self._attention(name, "self_attn"),
            **self._attention(name, "encoder_attn"),
            **layer_norm(f"{name}.final_layer_norm", self.hidden_size),
            **mlp(name, self.hidden_size, self.intermediate_size),
        }

    def _attention(self, layer_name: str, name: str) -> Shapes:
        size, module = self.hidden_size, f"{layer_name}.{name}"
        shapes = layer_norm(f"{module}_layer_norm", size)
        for part, bias in (("q", True), ("k", False), ("v", True)):
            shapes |= linear(f"{module}.{part}_proj", size, size, bias=bias)
        return shapes | linear(f"{module}.out_proj", size, size, bias=True)

    @classmethod
    def read(cls, fields: JsonFields) -> "WhisperConfig":
        reject_uncomputed(fields, computed=("is_encoder_decoder",))
        fields.reject_unless_neutral("scale_embedding", False, "embeddings are not scaled")
        size = fields.integer("d_model")
        num_heads = fields.integer("decoder_attention_heads")
        num_encoder_heads = fields.integer("encoder_attention_heads")
        for heads in (num_heads, num_encoder_heads):
            if size % heads:
                raise fields.wrong("d_model", f"a multiple of {heads} attention heads")
        num_encoder_tokens = fields.integer("max_source_positions", 1500)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=size,
            intermediate_size=fields.integer("decoder_ffn_dim"),
            num_layers=fields.count("decoder_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=size // num_heads,
            rotary_dim=0,
            rms_norm_eps=NORM_EPS,
            rope=DefaultRope(DEFAULT_THETA),
            max_position_embeddings=fields.integer("max_target_positions", 448),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
            dtype=checkpoint_dtype(fields),
            qkv_bias=(True, False, True),
            out_bias=True,
            mlp_bias=True,
            activation=read_activation(
                fields.with_defaults({"activation_function": "gelu"}),
                "activation_function",
                ("gelu", "gelu_tanh", "silu"),
            ),
            num_encoder_tokens=num_encoder_tokens,
            num_encoder_layers=fields.count("encoder_layers"),
            num_encoder_heads=num_encoder_heads,
            encoder_intermediate_size=fields.integer("encoder_ffn_dim"),
            audio=_read_audio(fields, num_encoder_tokens),
        )

    @property
    def max_encoder_tokens(self) -> int:
        return self.num_encoder_tokens

    @property
    def max_audio_samples(self) -> int:
        return self.audio.num_samples

    @property
    def sampling_rate(self) -> int:
        return self.audio.sampling_rate

    def cache_specs(self, sizes: CacheSizes) -> dict[str, KVCacheSpec]:
        cross = CrossAttentionSpec(
            block_size=sizes.block_size,
            num_kv_heads=self.num_local_kv_heads(sizes.num_shards),
            head_size=self.head_dim,
            dtype_bytes=sizes.dtype_bytes,
            max_encoder_tokens=self.max_encoder_tokens,
        )
        return super().cache_specs(sizes) | {
            cross_name(layer): cross for layer in range(self.num_layers)
        }

    def cut_sizes(self) -> dict[str, int]:
        return {
            "decoder_attention_heads": self.num_heads,
            "decoder_ffn_dim": self.intermediate_size,
            "encoder_attention_heads": self.num_encoder_heads,
            "encoder_ffn_dim": self.encoder_intermediate_size,
        }

    def check_split(self, *, num_shards: int, num_stages: int = 1) -> None:
        if num_stages > 1:
            raise UnsupportedModel(
                f"pipeline_parallel_size={num_stages}: models with an encoder do not support "
                "pipeline stages. Use pipeline_parallel_size=1, and tensor_parallel_size to divide "
                "the model among devices."
            )
        super().check_split(num_shards=num_shards)


def cross_name(layer: int) -> str:
    """Cache name of the encoder tokens' KV for a layer of the decoder."""
    return f"{cache_name(layer)}.cross"


def _read_audio(fields: JsonFields, num_encoder_tokens: int) -> AudioSettings:
    """The settings of the folder's feature extractor, or their defaults. Raises UnsupportedModel or
    BrokenCheckpoint, also if they contradict config.json."""
    given = fields.sibling_file("preprocessor_config.json")
    if given is None:
        processor = fields.sibling_file("processor_config.json")
        given = None if processor is None else processor.table("feature_extractor")
    if given is None:
        given = JsonFields({}, f"{fields.source} alone")
    given.reject_unless_neutral("dither", 0.0, "adding noise is not supported")
    given.reject_unless_neutral("padding_value", 0.0, "short audio is padded with silence")
    num_mel_bins = fields.integer("num_mel_bins", 80)
    if given.integer("feature_size", num_mel_bins) != num_mel_bins:
        raise given.wrong("feature_size", f"num_mel_bins={num_mel_bins} of config.json")
    rate, hop_length = given.integer("sampling_rate", 16_000), given.integer("hop_length", 160)
    num_frames = FRAMES_PER_TOKEN * num_encoder_tokens
    default_s = num_frames * hop_length / rate
    samples = given.real("chunk_length", default_s) * rate  # may be infinite
    if samples // hop_length != num_frames:
        raise given.wrong(
            "chunk_length",
            f"{default_s:g}: max_source_positions={num_encoder_tokens} in config.json needs "
            f"{num_frames} frames of hop_length={hop_length}",
        )
    num_samples, window_length = int(samples), given.integer("n_fft", 400)
    if window_length // 2 >= num_samples:  # reflection padding at both ends
        raise given.wrong("n_fft", f"below twice the {num_samples} samples of chunk_length")
    return AudioSettings(
        num_mel_bins=num_mel_bins,
        sampling_rate=rate,
        hop_length=hop_length,
        window_length=window_length,
        num_samples=num_samples,
    )
