"""BERT (Devlin et al., 2018), RoBERTa and XLM-RoBERTa: encoders, whose tokens attend to later ones.
They give embeddings or scores of labels, never tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from longshore.worker.errors import UnsupportedModel
from longshore.worker.models.decoder_config import (
    DecoderConfig,
    checkpoint_dtype,
    read_activation,
    reject_uncomputed,
)
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.rope_config import DEFAULT_THETA, DefaultRope
from longshore.worker.models.tensor_shapes import Shapes, layer_norm, linear, mlp

DEFAULT_SEPARATOR: Final = "[SEP]"


@dataclass(frozen=True, kw_only=True)
class BertConfig(DecoderConfig):
    """Positions are learned; there is no rope.

    first_position:  index of the first token's position in the checkpoint's table.
    num_token_types: embeddings that tell the two texts of a pair apart; 1: they are not told apart.
    separator_id:    the token after the first text of a pair; None: the tokenizer has none.
    """

    model_type = "bert"
    model = "longshore.worker.models.bert:Bert"
    is_bidirectional = True
    encoder: ClassVar[str] = "bert"
    head_names: ClassVar[tuple[str, str]] = ("bert.pooler.dense", "classifier")
    stored_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens.": "bert.embeddings.word_embeddings.",
        "model.layers.": "bert.encoder.layer.",
    }

    first_position: int
    num_token_types: int
    separator_id: int | None

    def tensor_shapes(self) -> Shapes:
        size, name = self.hidden_size, f"{self.encoder}.embeddings"
        num_positions = self.first_position + self.max_position_embeddings
        return {
            **super().tensor_shapes(),
            f"{name}.position_embeddings.weight": (num_positions, size),
            f"{name}.token_type_embeddings.weight": (self.num_token_types, size),
            **layer_norm(f"{name}.LayerNorm", size),
        }

    def norm_shapes(self) -> Shapes:
        return {}

    def classifier_shapes(self) -> Shapes:
        (dense, out), size = self.head_names, self.hidden_size
        return {
            **linear(dense, size, size, bias=True),
            **linear(out, len(self.labels), size, bias=True),
        }

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        size, attention = self.hidden_size, f"{name}.attention"
        names = ("self.query", "self.key", "self.value", "output.dense")
        return {
            **self.attention_shapes(attention, names),
            **layer_norm(f"{attention}.output.LayerNorm", size),
            **mlp(name, size, self.intermediate_size, ("intermediate.dense", "output.dense")),
            **layer_norm(f"{name}.output.LayerNorm", size),
        }

    def is_redundant(self, name: str) -> bool:
        """Buffers of indices are redundant, too, and so is the layer after the encoder that
        embeddings do not use."""
        return name.startswith(
            (
                f"{self.encoder}.pooler.dense.",
                f"{self.encoder}.embeddings.position_ids",
                f"{self.encoder}.embeddings.token_type_ids",
            )
        ) or super().is_redundant(name)

    @classmethod
    def read(cls, fields: JsonFields) -> "BertConfig":
        reject_uncomputed(fields)
        fields.reject_unless_neutral("is_decoder", False, "attention to later tokens is needed")
        fields.reject_unless_neutral(
            "position_embedding_type", "absolute", "relative positions are not supported"
        )
        size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if size % num_heads:
            raise fields.wrong("hidden_size", f"a multiple of num_attention_heads={num_heads}")
        first_position = cls._first_position(fields)
        num_positions = fields.integer("max_position_embeddings", 512) - first_position
        if num_positions < 1:
            raise fields.wrong("max_position_embeddings", f"more than {first_position}")
        num_token_types = fields.integer("type_vocab_size", 2)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=size // num_heads,
            rotary_dim=0,
            rms_norm_eps=fields.real("layer_norm_eps", 1e-12),
            rope=DefaultRope(DEFAULT_THETA),
            max_position_embeddings=num_positions,
            tie_word_embeddings=False,
            dtype=checkpoint_dtype(fields),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            activation=read_activation(
                fields.with_defaults({"hidden_act": "gelu"}),
                "hidden_act",
                ("gelu", "gelu_tanh", "silu"),
            ),
            has_head=False,
            first_position=first_position,
            num_token_types=num_token_types,
            separator_id=_separator_id(fields) if num_token_types > 1 else None,
        )

    @classmethod
    def _first_position(cls, fields: JsonFields) -> int:
        return 0

    def check_split(self, *, num_shards: int, num_stages: int = 1) -> None:
        if num_stages > 1:
            raise UnsupportedModel(
                f"pipeline_parallel_size={num_stages}: encoders such as {self.model_type} do not "
                "support pipeline stages. Use pipeline_parallel_size=1, and tensor_parallel_size "
                "to divide the model among devices."
            )
        super().check_split(num_shards=num_shards)


class RobertaConfig(BertConfig):
    """Positions are counted from the one after the padding token's."""

    model_type = "roberta"
    encoder = "roberta"
    head_names = ("classifier.dense", "classifier.out_proj")
    stored_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens.": "roberta.embeddings.word_embeddings.",
        "model.layers.": "roberta.encoder.layer.",
    }

    @classmethod
    def _first_position(cls, fields: JsonFields) -> int:
        return fields.integer("pad_token_id", 1, minimum=0) + 1


class XLMRobertaConfig(RobertaConfig):
    """RoBERTa with another vocabulary."""

    model_type = "xlm-roberta"


def _separator_id(fields: JsonFields) -> int | None:
    """The id of the tokenizer's separator; None if it has none."""
    settings = fields.sibling_file("tokenizer_config.json")
    name = None if settings is None else settings.values.get("sep_token")
    if isinstance(name, dict):
        name = name.get("content")
    tokenizer = fields.sibling_file("tokenizer.json")
    added = None if tokenizer is None else tokenizer.values.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == (name or DEFAULT_SEPARATOR):
            token_id = token.get("id")
            return token_id if isinstance(token_id, int) else None
    return None
