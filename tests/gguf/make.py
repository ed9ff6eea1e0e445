"""Makes the GGUF files beside this module with llama.cpp's own converter:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    python -m tests.gguf.make llama_cpp_python-0.3.36/vendor/llama.cpp

The archive has the sha256 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e. The
tokenizers are trained here on this repository's LICENSE. The converter knows real vocabularies by a
hash, so it is told what `tokenizer.ggml.pre` is. The file in `types/` is quantised by llama.cpp's
own code, which is compiled for it.
"""

import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from tests.gguf.cases import CASES, FILES, NVFP4, TYPES_SHAPE, GgufCase

SPECIAL: Final = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS: Final = [(FILES.parents[1] / "LICENSE").read_text()]
# As the tokenizer.json of models with these names have them.
PATTERNS: Final = {
    "llama-bpe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen35": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}


def make_tokenizer(name: str, folder: Path) -> None:
    """tokenizer.json, and for SentencePiece tokenizer.model."""
    if name == "sentencepiece":
        _train_sentence_piece(folder)
    elif name == "bert":
        _make_word_piece().save(str(folder / "tokenizer.json"))
    else:
        _train_byte_level(name).save(str(folder / "tokenizer.json"))


def _train_byte_level(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if name in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    if name in PATTERNS:
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in PATTERNS[name]]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:  # smollm and refact
        splits = [pre_tokenizers.Digits(individual_digits=True)]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=310,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if name == "llama-bpe":
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def _make_word_piece() -> Tokenizer:
    """The most frequent words, and all characters: the trainer is not deterministic."""
    words = Counter(re.findall("[a-z]+", CORPUS[0].lower()))
    frequent = sorted(words, key=lambda word: (-words[word], word))[:150]
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    texts = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters)
    texts = (*texts, *(f"##{letter}" for letter in letters if letter.isalnum()), *frequent)
    vocabulary = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(texts[:5]))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def _train_sentence_piece(folder: Path) -> None:
    import sentencepiece
    from transformers import LlamaTokenizerFast

    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=416,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    corpus.unlink()
    tokenizer = LlamaTokenizerFast.from_pretrained(folder).backend_tokenizer
    # As transformers 4 has written it, and Llama 2 was published.
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.pre_tokenizer = None
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    content = json.loads(tokenizer.to_str())
    content["model"]["unk_token"] = "<unk>"
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))


def make(case: GgufCase, converter: Any, base: Any, target: Path = FILES) -> None:
    """target: folder of the file, and of the folder of its tokenizer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / case.name  # which is in the metadata
        case.make_original(folder)
        make_tokenizer(case.tokenizer, folder)
        (target / "tokenizers").mkdir(exist_ok=True)
        shutil.copy(folder / "tokenizer.json", target / "tokenizers" / f"{case.tokenizer}.json")
        (folder / "tokenizer_config.json").write_text(json.dumps(_settings(case)))
        if case.family in ("GraniteMoeHybrid", "NemotronH"):
            _write_as_published(folder)
        base.TextModel.get_vocab_base_pre = lambda self, tokenizer: case.pre
        sys.argv = ["convert", str(folder), "--outfile", str(target / case.file.name)]
        sys.argv += ["--outtype", "f32", *case.options]
        with patch.object(base.ModelBase, "load_hparams", _loader(case, base)):
            converter.main()


def _loader(case: GgufCase, base: Any) -> Any:
    """How the converter reads config.json. It takes a Nemotron-H for one with experts if
    transformers has given it the defaults of a newer version."""
    if case.family != "NemotronH":
        return base.ModelBase.load_hparams
    return lambda folder, is_mistral_format: json.loads((folder / "config.json").read_text())


def _write_as_published(folder: Path) -> None:
    """Layer types as transformers 4 named them, and no number of experts without experts: the
    converter knows nothing else."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    key = "layer_types" if "layer_types" in config else "layers_block_type"
    config[key] = [names.get(each, each) for each in config[key]]
    if not config.get("num_local_experts", "moe" in config[key]):
        del config["num_experts_per_tok"]
    if "mlp" in config[key]:
        codes = {"mamba": "M", "attention": "*", "mlp": "-"}
        config["hybrid_override_pattern"] = "".join(codes[each] for each in config.pop(key))
        config["num_hidden_layers"] = len(config["hybrid_override_pattern"])
        for name in ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok"):
            config.pop(name, None)
    path.write_text(json.dumps(config))


def _settings(case: GgufCase) -> dict[str, Any]:
    if case.tokenizer == "bert":
        names = ("pad", "unk", "cls", "sep", "mask")
        settings: dict[str, Any] = {f"{name}_token": f"[{name.upper()}]" for name in names}
        return settings | {"tokenizer_class": "BertTokenizerFast"}
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings |= {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    return settings | {"add_bos_token": case.tokenizer in ("llama-bpe", "sentencepiece")}


def make_all(llama_cpp: str, target: Path = FILES) -> None:
    sys.path[:0] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    import convert_hf_to_gguf as converter
    from conversion import base

    for case in CASES:
        make(case, converter, base, target)
    make_types(Path(llama_cpp), target / "types")
    for name, source in NVFP4.items():
        make_nvfp4(converter, source, target / name)


def make_nvfp4(converter: Any, checkpoint: Path, folder: Path) -> None:
    """Of a checkpoint of Model Optimizer, whose tensors have factors. It has no tokenizer."""
    from conversion.llama import LlamaModel
    from conversion.qwen import Qwen3MoeModel

    folder.mkdir(exist_ok=True)
    for kind in (LlamaModel, Qwen3MoeModel):
        kind.set_vocab = lambda self: None
    with tempfile.TemporaryDirectory() as name:
        source = shutil.copytree(checkpoint, Path(name) / "nvfp4")
        sys.argv = ["convert", str(source), "--outfile", str(folder / "model.gguf")]
        sys.argv += ["--outtype", "f32"]
        converter.main()


def make_types(llama_cpp: Path, folder: Path) -> None:
    """A file with the same values in each type, which is the name of the tensor."""
    import gguf

    from tests.gguf.ggml import Ggml
    from tests.gguf.reference import LAYOUTS

    folder.mkdir(exist_ok=True)
    values = np.random.default_rng(0).standard_normal(TYPES_SHAPE).astype(np.float32)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_head_count(1)
    with tempfile.TemporaryDirectory() as library:
        ggml = Ggml(llama_cpp, Path(library))
        for name in LAYOUTS:
            kind = gguf.GGMLQuantizationType[name]
            writer.add_tensor(name, ggml.quantise(values, name), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    make_all(sys.argv[1], *map(Path, sys.argv[2:]))
