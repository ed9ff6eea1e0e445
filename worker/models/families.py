"""The supported model families, by their architecture in config.json.

A family has two files: `<family>_config.py` reads config.json, and `<family>.py` computes with
torch. They are separate because the command line and the supervisor derive settings from a model's
config (lengths, KV cache plan, parallel sizes) in processes that must not load torch, whose import
takes seconds. Only the worker imports the second file, through `DecoderConfig.model`.

Other packages add families in the entry point group `longshore.models`: the name is the
architecture, the value the subclass of DecoderConfig that reads it (docs/models.md).
"""

import re
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from longshore.protocol.errors import shortened
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.loading.checkpoint import check_checkpoint
from longshore.worker.loading.quantization_config import read_quantisation
from longshore.worker.loading.stored_weights import StoredWeights
from longshore.worker.loading.tensor_names import (
    is_bare_checkpoint,
    num_stored_layers,
    tensor_names,
)
from longshore.worker.models.bamba_config import BambaConfig
from longshore.worker.models.bert_config import BertConfig, RobertaConfig, XLMRobertaConfig
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.deepseek_config import DeepseekV2Config, DeepseekV3Config
from longshore.worker.models.falcon_h1_config import FalconH1Config
from longshore.worker.models.gemma2_config import Gemma2Config
from longshore.worker.models.gemma3_config import Gemma3Config, Gemma3ImagesConfig
from longshore.worker.models.gpt_oss_config import GptOssConfig
from longshore.worker.models.granite_hybrid_config import GraniteHybridConfig
from longshore.worker.models.json_fields import MAX_COUNT, JsonFields, read_json_object
from longshore.worker.models.lfm2_config import Lfm2Config, Lfm2MoeConfig
from longshore.worker.models.llama4_config import Llama4Config
from longshore.worker.models.llama_config import LlamaConfig
from longshore.worker.models.mamba2_config import Mamba2Config
from longshore.worker.models.mistral_config import MistralConfig
from longshore.worker.models.mixtral_config import MixtralConfig
from longshore.worker.models.nemotron_h_config import NemotronHConfig
from longshore.worker.models.olmo2_config import Olmo2Config
from longshore.worker.models.phi3_config import Phi3Config
from longshore.worker.models.qwen2_config import Qwen2Config
from longshore.worker.models.qwen3_5_config import (
    Qwen35Config,
    Qwen35ImagesConfig,
    Qwen35MoeConfig,
    Qwen35MoeImagesConfig,
)
from longshore.worker.models.qwen3_config import Qwen3Config
from longshore.worker.models.qwen3_moe_config import Qwen3MoeConfig
from longshore.worker.models.qwen3_next_config import Qwen3NextConfig
from longshore.worker.models.whisper_config import WhisperConfig

ENTRY_POINT_GROUP: Final = "longshore.models"
ARCHITECTURES: Final[dict[str, type[DecoderConfig]]] = {
    "BambaForCausalLM": BambaConfig,
    "DeepseekV2ForCausalLM": DeepseekV2Config,
    "DeepseekV3ForCausalLM": DeepseekV3Config,
    "FalconH1ForCausalLM": FalconH1Config,
    "Gemma2ForCausalLM": Gemma2Config,
    "Gemma3ForCausalLM": Gemma3Config,
    "Gemma3ForConditionalGeneration": Gemma3ImagesConfig,
    "GptOssForCausalLM": GptOssConfig,
    "GraniteMoeHybridForCausalLM": GraniteHybridConfig,
    "Lfm2ForCausalLM": Lfm2Config,
    "Lfm2MoeForCausalLM": Lfm2MoeConfig,
    "Llama4ForCausalLM": Llama4Config,
    "LlamaForCausalLM": LlamaConfig,
    "Mamba2ForCausalLM": Mamba2Config,
    "MistralForCausalLM": MistralConfig,
    "MixtralForCausalLM": MixtralConfig,
    "NemotronHForCausalLM": NemotronHConfig,
    "Olmo2ForCausalLM": Olmo2Config,
    "Phi3ForCausalLM": Phi3Config,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
    "Qwen3NextForCausalLM": Qwen3NextConfig,
    "Qwen3_5ForCausalLM": Qwen35Config,
    "Qwen3_5ForConditionalGeneration": Qwen35ImagesConfig,
    "Qwen3_5MoeForCausalLM": Qwen35MoeConfig,
    "Qwen3_5MoeForConditionalGeneration": Qwen35MoeImagesConfig,
    "WhisperForConditionalGeneration": WhisperConfig,
}
CLASSIFIERS: Final[dict[str, type[DecoderConfig]]] = {
    "DeepseekV2ForSequenceClassification": DeepseekV2Config,
    "DeepseekV3ForSequenceClassification": DeepseekV3Config,
    "Gemma2ForSequenceClassification": Gemma2Config,
    "Gemma3TextForSequenceClassification": Gemma3Config,
    "GptOssForSequenceClassification": GptOssConfig,
    "LlamaForSequenceClassification": LlamaConfig,
    "MistralForSequenceClassification": MistralConfig,
    "MixtralForSequenceClassification": MixtralConfig,
    "Olmo2ForSequenceClassification": Olmo2Config,
    "Phi3ForSequenceClassification": Phi3Config,
    "Qwen2ForSequenceClassification": Qwen2Config,
    "Qwen3ForSequenceClassification": Qwen3Config,
    "Qwen3MoeForSequenceClassification": Qwen3MoeConfig,
}
"""Decoders with a classification head instead of the output head."""
ENCODERS: Final[dict[str, type[DecoderConfig]]] = {
    "BertForSequenceClassification": BertConfig,
    "BertModel": BertConfig,
    "RobertaForSequenceClassification": RobertaConfig,
    "RobertaModel": RobertaConfig,
    "XLMRobertaForSequenceClassification": XLMRobertaConfig,
    "XLMRobertaModel": XLMRobertaConfig,
}
"""Models whose tokens attend to later ones, with a classification head or without a head."""
_OWN: Final = {*ARCHITECTURES.values(), *CLASSIFIERS.values(), *ENCODERS.values()}
DEFAULT_NUM_LABELS: Final = 2  # as in transformers
_CLASSIFIER: Final = "ForSequenceClassification"


def read_model_config(model_dir: Path) -> DecoderConfig:
    """Read `model_dir/config.json`. `has_head` follows the checkpoint's tensor names, because many
    embedding models declare an architecture with a head but do not contain one.

    Raises UnsupportedModel for an architecture or feature that is not supported, and
    BrokenCheckpoint for a missing or invalid file.
    """
    fields = read_json_object(model_dir / "config.json")
    config = _family(fields).read(fields)
    read_quantisation(fields)  # rejects what is not supported
    names = tensor_names(model_dir)
    config = config.with_names(names)
    if 0 < (num_stored := num_stored_layers(names)) < config.num_layers:
        raise BrokenCheckpoint(
            f"{fields.source} declares {config.num_layers:,} layers, but the checkpoint has "
            f"{num_stored:,}. The weights are incomplete, or config.json belongs to another model."
        )
    if config.is_bidirectional:
        has_labels = any(name.endswith(_CLASSIFIER) for name in _architectures(fields))
        return replace(config, labels=read_labels(fields) if has_labels else ())
    if any(name in CLASSIFIERS for name in _architectures(fields)):
        tokens = _label_tokens(fields, config.vocab_size)
        labels = read_labels(fields) if tokens is None else ("LABEL_0",)
        return replace(config, has_head=False, labels=labels, label_tokens=tokens)
    if not config.tie_word_embeddings and (
        _is_bare_architecture(fields) or is_bare_checkpoint(names)
    ):
        config = replace(config, has_head=False)
    return config


def check_weights(config: DecoderConfig, weights: StoredWeights) -> None:
    """Check that the weights fit the config, by the headers of their files. Raises BrokenCheckpoint
    or UnsupportedModel. What families of other packages need, only their models know."""
    if type(config) in _OWN:
        check_checkpoint(config, weights)


def read_labels(fields: JsonFields) -> tuple[str, ...]:
    """The names of a classification head's labels. Raises BrokenCheckpoint."""
    names = fields.table("id2label")
    if names is None:
        num_labels = fields.count("num_labels", DEFAULT_NUM_LABELS)
        return tuple(f"LABEL_{index}" for index in range(num_labels))
    found = [names.values.get(str(index)) for index in range(min(len(names.values), MAX_COUNT))]
    labels = tuple(name for name in found if isinstance(name, str))
    if not labels or len(labels) != len(names.values):
        raise fields.wrong(
            "id2label", f"an object with the keys 0, 1, ... and up to {MAX_COUNT:,} names"
        )
    return labels


def _label_tokens(fields: JsonFields, vocab_size: int) -> tuple[int, int] | None:
    """The two tokens of `classifier_from_token`, with which vLLM makes a classifier of a language
    model. Raises UnsupportedModel or BrokenCheckpoint."""
    names = fields.values.get("classifier_from_token")
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != 2:
        raise fields.wrong("classifier_from_token", "a list of two tokens: against, and for")
    is_difference = fields.text("method", "") == "from_2_way_softmax"
    if not (is_difference or fields.boolean("is_original_qwen3_reranker", False)):
        raise UnsupportedModel(
            f"{fields.source}: classifier_from_token is supported with method=from_2_way_softmax "
            "or is_original_qwen3_reranker=true."
        )
    tokenizer = fields.sibling_file("tokenizer.json")
    model = None if tokenizer is None else tokenizer.table("model")
    vocab = None if model is None else model.table("vocab")
    if vocab is None:
        raise BrokenCheckpoint(
            f"{fields.source}: classifier_from_token needs a tokenizer.json with a vocabulary."
        )
    against, of_label = (vocab.integer(str(name), minimum=0) for name in names)
    if max(against, of_label) >= vocab_size:
        raise fields.wrong("classifier_from_token", f"tokens below vocab_size={vocab_size}")
    return against, of_label


def _is_bare_architecture(fields: JsonFields) -> bool:
    """Whether the architecture is a decoder without an output head, such as `Qwen3Model`."""
    names = _architectures(fields)
    is_known = any(name in ARCHITECTURES for name in names)
    return not is_known and any(_with_head(name) in ARCHITECTURES for name in names)


def _architectures(fields: JsonFields) -> list[str]:
    names = fields.values.get("architectures") or ()
    if not isinstance(names, list | tuple):
        raise fields.wrong("architectures", "a list of names")
    return [str(name) for name in names]


def _with_head(name: str) -> str:
    """The architecture with an output head for a bare one: `Qwen3ForCausalLM` for `Qwen3Model`."""
    return re.sub("Model$", "ForCausalLM", name)


def _family(fields: JsonFields) -> type[DecoderConfig]:
    names = _architectures(fields)
    if not names:
        model_type = fields.text("model_type", "none")
        for family in (*ARCHITECTURES.values(), *ENCODERS.values()):
            if family.model_type == model_type:
                return family
        raise UnsupportedModel(
            f"{fields.source}: model_type={model_type!r} is not supported. {_supported()}"
        )
    known = ARCHITECTURES | CLASSIFIERS | ENCODERS
    for name in (*names, *map(_with_head, names)):
        if name in known:
            return known[name]
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        if entry_point.name in names:
            return _checked_family(entry_point.name, entry_point.load())
    raise UnsupportedModel(
        f"{fields.source}: architecture {shortened(', '.join(names))} is not supported. "
        f"{_supported()}"
    )


def _checked_family(name: str, family: object) -> type[DecoderConfig]:
    if isinstance(family, type) and issubclass(family, DecoderConfig):
        return family
    raise UnsupportedModel(
        f"The entry point {name} of {ENTRY_POINT_GROUP} refers to {family!r}, which is not a "
        "subclass of DecoderConfig (docs/models.md)."
    )


def _supported() -> str:
    installed = {entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    known = ARCHITECTURES.keys() | CLASSIFIERS.keys() | ENCODERS.keys() | installed
    return f"Supported: {', '.join(sorted(known))}."
