"""GGUF files that llama.cpp's converter made of tiny models: the folder that is derived from each
is the model that was converted."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer

from longshore.deploy.gateway.config import ModelConfig
from longshore.deploy.gateway.ollama.model_routes import OllamaModelFacts
from longshore.deploy.model.folder import ModelFolder, SamplingDefaults, read_model_folder
from longshore.deploy.model.gguf_folder import gguf_folder
from longshore.deploy.model.hub import model_name
from longshore.deploy.model.text_files import read_text_files
from longshore.protocol.errors import ConfigError
from longshore.protocol.gguf_header import read_gguf_header
from longshore.protocol.handshake import model_fingerprint
from longshore.worker.layers.rotary import rope_frequencies
from longshore.worker.loading.checkpoint import find_weights, match_checkpoint
from longshore.worker.models.bamba_config import HybridConfig
from longshore.worker.models.bert_config import BertConfig
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.deepseek_config import DeepseekConfig
from longshore.worker.models.families import check_weights, read_model_config
from longshore.worker.models.llama_config import LlamaConfig
from longshore.worker.models.mistral_config import MistralConfig
from longshore.worker.models.nemotron_h_config import NemotronHConfig
from tests.fuzz.mutations import refusal
from tests.gguf.cases import CASES, FILES, GgufCase
from tests.gguf.make import make_tokenizer
from tests.gguf.writing import changed, split

LLAMA = FILES / "llama.gguf"
ROUNDED = 2**-23  # norms are stored plus one, logarithms as powers of e: in float32
TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  two  spaces,\ttabs\t\tand\r\nlines\n\n\n end  ",
    "I'm, you're, WE'LL, it's; they'd'VE",
    "1 12 123 1234 12345.678 ½ ² Ⅳ ٣٤٥",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # ÷\n\n\nclass A_b:\n\tpass\n",
    "Größe, naïve, Ångström, e\u0301 and é, ǅ, ﬁ, ß→SS",
    "中文和日本語のテキスト、한국어 텍스트, ไทย, हिन्दी, עברית, العربية",
    "🚀 👩‍👩‍👧‍👦 ✅ \u200b\u00a0\ufeff…—“quoted”",
    "<s>text</s> <|im_start|>user\nhi<|im_end|> <unk> [CLS] [MASK]",
    "a" * 50 + "\x00\x01\x7f",
    "$100, 50%; a+b==c && d||!e ^~`|<>{}[]\\/",
)


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


def read(path: Path, state_dir: Path) -> ModelFolder:
    return read_model_folder(path, state_dir)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_converted_file_is_the_model_that_was_converted(
    case: GgufCase, state_dir: Path, tmp_path: Path
) -> None:
    case.make_original(tmp_path)
    folder = read(case.file, state_dir).path
    config, expected = read_model_config(folder), read_model_config(tmp_path)
    check_weights(config, find_weights(folder))
    assert_same_rope(config, expected)
    assert comparable(config) == comparable(expected)
    shapes = expected.tensor_shapes()
    found, original = (
        match_checkpoint(
            find_weights(path), shapes, lambda name: config.is_redundant(config.own_name(name))
        )
        for path in (folder, tmp_path)
    )
    assert len(found.names) == len(shapes)
    with found.weights.reader() as read_found, original.weights.reader() as read_original:
        for name, shape in shapes.items():
            whole = (slice(None),) * len(shape)
            part = tuple(slice(size // 3, size - size // 4) for size in shape)
            values = read_found(found.names[name], whole)
            rounding = ROUNDED if "norm" in name or name.endswith("A_log") else 0.0
            exact = read_original(original.names[name], whole)
            torch.testing.assert_close(values, exact, rtol=0, atol=rounding)
            assert torch.equal(read_found(found.names[name], part), values[part])


def assert_same_rope(config: DecoderConfig, expected: DecoderConfig) -> None:
    """A file has the factors that follow from the settings of a rope."""
    for max_model_len in (64, 256):
        (found, amplitude), (exact, exact_amplitude) = (
            rope_frequencies(each.rope, max(each.rotary_dim, 2), max_model_len)
            for each in (config, expected)
        )
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)
        assert amplitude == pytest.approx(exact_amplitude, rel=1e-6)


def comparable(config: DecoderConfig) -> dict[str, object]:
    """What a file can say of a config."""
    config = replace(config, rope=None)
    if isinstance(config, NemotronHConfig):
        width = config.intermediate_size if "mlp" in config.kinds else 0
        config = replace(config, max_position_embeddings=0, intermediate_size=width)
    if isinstance(config, HybridConfig):
        config = replace(config, max_position_embeddings=0)  # without positions, arbitrary
        if len(config.attention_layers) == config.num_layers:
            config = replace(config, mamba=None)
    if isinstance(config, DeepseekConfig):
        config = replace(config, num_mtp_layers=0)
    if isinstance(config, BertConfig):
        config = replace(config, separator_id=None)  # the original has no tokenizer
    family = LlamaConfig if isinstance(config, MistralConfig) else type(config)
    return {"family": family, **vars(config)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_texts_have_the_tokens_of_the_original_tokenizer(case: GgufCase, state_dir: Path) -> None:
    model = read(case.file, state_dir)
    assert model.tokenizer_file is not None
    found = Tokenizer.from_file(str(model.tokenizer_file))
    original = Tokenizer.from_file(str(FILES / "tokenizers" / f"{case.tokenizer}.json"))
    if case.name.startswith("gemma"):  # without a space before the first word
        original.normalizer = original.normalizer[1]
        original.decoder = Tokenizer.from_str(found.to_str()).decoder
    for text in TEXTS:
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special).ids
            assert found.encode(text, add_special_tokens=special).ids == ids, (text, special)
        assert found.decode(ids, skip_special_tokens=False) == original.decode(
            ids, skip_special_tokens=False
        )
    assert found.encode("one", "two").ids == original.encode("one", "two").ids


def test_texts_have_the_tokens_of_sentencepiece_itself(state_dir: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    make_tokenizer("sentencepiece", tmp_path)
    original = library.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    found = Tokenizer.from_file(str(read(FILES / "mistral.gguf", state_dir).tokenizer_file))
    for text in TEXTS:
        if "<s>" not in text:  # which the library reads as text
            assert found.encode(text, add_special_tokens=False).ids == original.encode(text), text


def test_special_tokens_chat_template_and_ends_are_those_of_the_file(state_dir: Path) -> None:
    model = read(LLAMA, state_dir)
    files = read_text_files(model.path, model.tokenizer_file)
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert files.templates["default"].startswith("{% for message in messages %}<|im_start|>")
    # <|im_end|> ends an answer, too, although the file names only one token.
    assert model.eos_token_ids == (2, 4)
    assert model.can_chat
    assert model.name == "llama"
    assert model.checkpoint_dtype == "float32"


def test_a_folder_is_made_once_and_again_if_it_was_changed(tmp_path: Path, state_dir: Path) -> None:
    file = shutil.copy(LLAMA, tmp_path / "copy.gguf")
    folder = read(file, state_dir).path
    assert (folder / "copy.gguf").resolve() == file
    made = (folder / "config.json").stat()
    assert read(file, state_dir).path == folder
    assert (folder / "config.json").stat().st_mtime_ns == made.st_mtime_ns
    (folder / "config.json").write_text("{}")
    assert read(file, state_dir).vocab_size == 320
    assert read(LLAMA, state_dir).path != folder
    shutil.copy(FILES / "qwen2.gguf", file)
    assert read(file, state_dir).path != folder


def test_folders_whose_file_was_replaced_or_removed_are_removed_unless_a_process_uses_them(
    tmp_path: Path,
) -> None:
    state_dir, used = tmp_path / "state", tmp_path / "used.gguf"
    files = [used, tmp_path / "removed.gguf", tmp_path / "there.gguf"]
    for file in files:
        shutil.copy(LLAMA, file)
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from longshore.deploy.model.gguf_folder import gguf_folder\n"
        "state_dir, *files = map(Path, sys.argv[1:])\n"
        "print(*(gguf_folder(file, state_dir) for file in files), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(state_dir), *map(str, files)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        first, removed, there = map(Path, process.stdout.readline().split())
        shutil.copy(FILES / "qwen2.gguf", used)
        files[1].unlink()
        second = gguf_folder(used, state_dir)
        assert all(folder.is_dir() for folder in (first, removed, there, second))
    assert gguf_folder(used, state_dir) == second
    assert set((state_dir / "gguf").iterdir()) == {there, second}


def test_files_of_other_weights_have_other_fingerprints(tmp_path: Path, state_dir: Path) -> None:
    """Even a single value of a small tensor makes another model; another place does not."""
    content = bytearray(LLAMA.read_bytes())
    begin = next(
        each.data_offset
        for each in gguf.GGUFReader(LLAMA).tensors
        if each.name == "blk.1.ffn_norm.weight"
    )
    content[begin + 12] ^= 1
    (tmp_path / "llama.gguf").write_bytes(content)
    (tmp_path / "same").mkdir()
    same = shutil.copy(LLAMA, tmp_path / "same")
    original, other, same = (
        model_fingerprint(read(path, state_dir).path)
        for path in (LLAMA, tmp_path / "llama.gguf", same)
    )
    assert original == same != other


def test_a_folder_with_one_file_is_a_model(tmp_path: Path, state_dir: Path) -> None:
    shutil.copy(LLAMA, tmp_path)
    (tmp_path / "mmproj-llama.gguf").write_bytes(b"of images")
    assert read(tmp_path, state_dir).name == tmp_path.name
    shutil.copy(LLAMA, tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"2 models in GGUF files \(llama, other\)"):
        read(tmp_path, state_dir)


def test_a_link_keeps_its_own_name(tmp_path: Path, state_dir: Path) -> None:
    """In the model hub's cache, files are links to others that are named by their hashes."""
    (tmp_path / "hash").write_bytes(LLAMA.read_bytes())
    link = tmp_path / "linked.gguf"
    link.symlink_to("hash")
    found = read(link, state_dir)
    assert found.name == "linked"
    check_weights(read_model_config(found.path), find_weights(found.path))
    assert read(link, state_dir).path == found.path
    (tmp_path / "hash").write_bytes((FILES / "qwen2.gguf").read_bytes())
    assert read(link, state_dir).path != found.path


def test_a_split_file_is_the_whole_one(tmp_path: Path, state_dir: Path) -> None:
    parts = split(LLAMA, tmp_path, 3)
    for path in (*parts, tmp_path):
        model = read(path, state_dir)
        check_weights(read_model_config(model.path), find_weights(model.path))
        assert (
            model.path.joinpath("config.json").read_bytes()
            == (read(LLAMA, state_dir).path / "config.json").read_bytes()
        )
    assert model_name(parts[1]) == "llama"
    parts[1].rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"lacks llama-00002-of-00003\.gguf"):
        read(parts[0], state_dir)
    shutil.copy(parts[2], parts[1])
    with pytest.raises(ConfigError, match=r"llama-00002-of-00003.gguf is not part 2 of 3"):
        read(parts[0], state_dir)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "qwen3next", "nemotron_h_moe"])
def test_layers_for_multi_token_prediction_are_not_loaded(
    name: str, tmp_path: Path, state_dir: Path
) -> None:
    drafted = {f"{name}__nextn_predict_layers": 1}
    file = changed(FILES / f"{name}.gguf", tmp_path / "drafter.gguf", **drafted)
    folder = read(file, state_dir).path
    config, weights = read_model_config(folder), find_weights(folder)
    num_layers = 2 if name == "nemotron_h_moe" else 1
    assert config.num_layers == num_layers
    check_weights(config, weights)
    assert not any(f"layers.{num_layers}." in name for name in weights.tensors)


@pytest.mark.parametrize("function", [1, 3, None])
def test_experts_of_lfm2_have_a_sigmoid_router(
    function: int | None, tmp_path: Path, state_dir: Path
) -> None:
    changes = {"lfm2moe__expert_gating_func": function}
    file = changed(FILES / "lfm2moe.gguf", tmp_path / "softmax.gguf", **changes)
    with pytest.raises(ConfigError, match="experts without a sigmoid router"):
        read(file, state_dir)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm__group_count": 3}, "linear_num_key_heads=3 must be a divisor"),
        ({"ssm__state_size": 0}, "linear_key_head_dim=0 must be a number"),
        ({"ssm__inner_size": None}, "a setting that is not a number"),
        ({"nextn_predict_layers": 2}, "nextn_predict_layers=2"),
        ({"ssm__state_size": 9}, "has 320 rows or columns of heads, .* imply 328"),
        ({"ssm__inner_size": 248}, "has 320 rows or columns of heads, .* imply 312"),
    ],
)
def test_heads_that_do_not_fit_the_tensors_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path, state_dir: Path
) -> None:
    changes = {f"qwen35__{key}": value for key, value in changes.items()}
    file = changed(FILES / "qwen35.gguf", tmp_path / "changed.gguf", **changes)
    with pytest.raises(ConfigError, match=message):
        find_weights(read(file, state_dir).path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "falcon"}, "the architecture 'falcon' are not supported"),
        (
            {"tokenizer__ggml__pre": "unheard-of"},
            "tokenizer.ggml.pre='unheard-of' is not supported",
        ),
        ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre='' is not supported"),
        ({"tokenizer__ggml__model": "rwkv"}, "the tokenizer 'rwkv' is not supported"),
        ({"tokenizer__ggml__merges": ["zz q"]}, "merges of tokens that it does not have"),
        ({"tokenizer__ggml__token_type": [1]}, "320 tokens and 1 types"),
        ({"llama__attention__clamp_kqv": 8.0}, r"not supported: llama.attention.clamp_kqv"),
        ({"llama__attention__temperature_scale": 0.1}, "attention scaled by position"),
        ({"llama__attention__value_length": 4}, "keys and values of different widths"),
        ({"llama__rope__scaling__type": "ntk"}, "both rope_freqs.weight and rope scaling 'ntk'"),
        ({"llama__block_count": 3}, "llama.block_count=3, and tensors of 2 layers"),
        ({"llama__block_count": "two"}, "llama.block_count='two'"),
        ({"split__count": "two"}, "is not part 1 of 1 of a GGUF file"),
        ({"llama__embedding_length": None}, "hidden_size is missing"),
        ({"llama__attention__head_count": 3}, "num_key_value_heads=2 must be a divisor"),
        ({"llama__context_length": 0}, "max_position_embeddings=0 must be a number"),
        (
            {"llama__attention__layer_norm_rms_epsilon": float("nan")},
            "a number that is infinite or nan",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    changes: dict[str, object], message: str, state_dir: Path, tmp_path: Path
) -> None:
    file = changed(LLAMA, tmp_path / "changed.gguf", **changes)
    with pytest.raises(ConfigError, match=message) as error:
        read(file, state_dir)
    assert "\n" not in str(error.value)


def test_ollama_s_clients_see_how_the_file_is_stored(state_dir: Path, tmp_path: Path) -> None:
    model = read(changed(FILES / "qwen2.gguf", tmp_path / "small.gguf", quantise=True), state_dir)
    served = ModelConfig(
        folder=str(model.path),
        name="small",
        fingerprint="",
        vocab_size=model.vocab_size,
        eos_token_ids=(),
        max_model_len=256,
        sampling_defaults=SamplingDefaults(),
        members=(),
    )
    facts = OllamaModelFacts(served, created=0)
    details = facts.details
    assert (details.format, details.family) == ("gguf", "qwen2")
    assert details.quantization_level == "Q8_0"
    assert facts.listed[0].size > (tmp_path / "small.gguf").stat().st_size


def test_settings_of_the_metadata_reach_the_requests(state_dir: Path, tmp_path: Path) -> None:
    file = changed(
        LLAMA,
        tmp_path / "sampled.gguf",
        general__sampling__temp=0.6,
        general__sampling__top_k=20,
        tokenizer__ggml__eot_token_id=3,
    )
    model = read(file, state_dir)
    assert (model.sampling_defaults.temperature, model.sampling_defaults.top_k) == (0.6, 20)
    assert model.eos_token_ids == (2, 3, 4)


def test_an_encoder_pools_as_its_file_says(state_dir: Path, tmp_path: Path) -> None:
    file = changed(FILES / "bert.gguf", tmp_path / "bert.gguf", bert__pooling_type=1)
    embedding = read(file, state_dir).embedding
    assert embedding is not None
    assert (embedding.kind, embedding.normalize, embedding.is_only) == ("mean", True, True)
    folder = read(FILES / "bert.gguf", state_dir).path
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertModel"]


def test_odd_settings_are_read_or_refused(tmp_path: Path, state_dir: Path) -> None:
    """Each setting of an architecture with values of other types."""
    for name in ("deepseek2", "granitehybrid"):
        header = read_gguf_header(FILES / f"{name}.gguf")
        keys = [key for key in header.metadata if key.startswith(f"{name}.")]
        assert len(keys) > 10
        for key in keys:
            changes = {key.replace(".", "__"): "odd"}
            file = changed(FILES / f"{name}.gguf", tmp_path / "odd.gguf", **changes)
            error = refusal(lambda file=file: read(file, state_dir), ConfigError)
            assert error is None or "\n" not in str(error)
