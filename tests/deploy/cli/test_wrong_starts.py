"""Starts that cannot succeed are refused in one line, before a process is started or torch loaded.

They run in this process, up to where `longshore serve` would take its fork server. That the command
itself ends so, and leaves nothing, is tested in `tests/integration/test_bad_starts.py`.
"""

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from longshore.deploy.cli import main as command
from longshore.deploy.cli import serve as serving
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.deploy.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from tests.gguf.cases import FILES as GGUF_FILES
from tests.models import make_tiny_llama


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_by_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def replace_by_circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def nest(path: Path) -> None:
    path.write_text('{"a":' * 100_000)


def edit_tokenizer(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_template(folder: Path, template: object) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def edit_header(folder: Path, header: bytes) -> None:
    """Replace the weights by the header of a safetensors file."""
    length = len(header).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(length + header)


def split(regex: str) -> dict[str, object]:
    pattern = {"Regex": regex}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


TENFOLD: Final = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}

TEXT_FILES: Final[dict[str, tuple[Callable[[Path], Any], str]]] = {
    "regex that panics": (
        lambda folder: edit_tokenizer(folder, pre_tokenizer=split("(a|aa)+$")),
        "retry-limit-in-match over",
    ),
    "no regex": (
        lambda folder: edit_tokenizer(folder, pre_tokenizer=split("(a")),
        "end pattern with unmatched parenthesis",
    ),
    "exploding normalizers": (
        lambda folder: edit_tokenizer(
            folder, normalizer={"type": "Sequence", "normalizers": [TENFOLD] * 12}
        ),
        "cannot be used as a tokenizer",
    ),
    "table that panics": (
        lambda folder: edit_tokenizer(
            folder, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAA"}
        ),
        "Cannot parse precompiled_charsmap",
    ),
    "chunks of nothing": (
        lambda folder: edit_tokenizer(folder, pre_tokenizer={"type": "FixedLength", "length": 0}),
        "chunk size must be non-zero",
    ),
    "decoder that panics": (
        lambda folder: edit_tokenizer(
            folder, decoder={"type": "Strip", "content": "a", "start": 1, "stop": 1}
        ),
        "a decoder that is not supported",
    ),
    "decoder that grows": (
        lambda folder: edit_tokenizer(folder, decoder=TENFOLD | {"content": "a" * 1000}),
        "up to 1000 times as long",
    ),
    "no vocabulary": (
        lambda folder: edit_tokenizer(folder, model={"type": "BPE", "vocab": 5}),
        "cannot be read as a tokenizer",
    ),
    "another model": (
        lambda folder: edit_tokenizer(folder, model={"type": "Later"}),
        "cannot be used as a tokenizer",
    ),
    "nested tokenizer": (lambda folder: nest(folder / "tokenizer.json"), "nested too deeply"),
    "tokenizer is a pipe": (
        lambda folder: replace_by_pipe(folder / "tokenizer.json"),
        "it is not a regular file",
    ),
    "tokenizer is a circle": (
        lambda folder: replace_by_circle(folder / "tokenizer.json"),
        "Too many levels of symbolic links",
    ),
    "tokenizer is a device": (
        lambda folder: (
            (folder / "tokenizer.json").unlink(),
            (folder / "tokenizer.json").symlink_to("/dev/zero"),
        )[1],
        "it is not a regular file",
    ),
    "tokenizer is huge": (
        lambda folder: os.truncate(folder / "tokenizer.json", 1 << 40),
        "it has more than 268,435,456 bytes",
    ),
    "500 nested ifs": (
        lambda folder: edit_template(folder, "{% if a %}" * 500 + "{% endif %}" * 500),
        "the chat template does not compile",
    ),
    "long sum": (
        lambda folder: edit_template(folder, "{{ 1" + " + 1" * 20_000 + " }}"),
        "the chat template does not compile",
    ),
    "huge template": (
        lambda folder: edit_template(folder, "a" * (1 << 20)),
        "the chat template has 1048576 characters",
    ),
    "template is a pipe": (
        lambda folder: replace_by_pipe(folder / "chat_template.jinja"),
        "it is not a regular file",
    ),
    "nested template settings": (
        lambda folder: nest(folder / "tokenizer_config.json"),
        "nested too deeply",
    ),
    "settings of no type": (
        lambda folder: (folder / "generation_config.json").write_text('{"temperature": []}'),
        "generation_config.json",
    ),
    "end of no type": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": {}}'),
        "neither an id nor a list of ids",
    ),
    "vocabulary of no type": (lambda folder: edit(folder, vocab_size=[1]), "vocab_size"),
    "vocabulary without end": (lambda folder: edit(folder, vocab_size=10**30), "vocab_size"),
}

FOLDERS: Final[dict[str, tuple[Callable[[Path], Any], str]]] = {
    "layers": (
        lambda folder: edit(folder, num_hidden_layers=10**9),
        "num_hidden_layers=1000000000 must be a number of at most 16,384",
    ),
    "nested config": (lambda folder: nest(folder / "config.json"), "nested too deeply"),
    "nested defaults": (
        lambda folder: nest(folder / "generation_config.json"),
        "nested too deeply",
    ),
    "config is a pipe": (
        lambda folder: replace_by_pipe(folder / "config.json"),
        "config.json is not readable JSON: [Errno 22] it is not a regular file",
    ),
    "weights are a pipe": (
        lambda folder: replace_by_pipe(folder / "model.safetensors"),
        "it is not a regular file",
    ),
    "config is a circle": (
        lambda folder: replace_by_circle(folder / "config.json"),
        "Too many levels of symbolic links",
    ),
    "folder is a circle": (
        lambda folder: (shutil.rmtree(folder), folder.symlink_to(folder))[1],
        "cannot be opened (Too many levels of symbolic links)",
    ),
}

WEIGHTS: Final[dict[str, tuple[Callable[[Path], Any], str]]] = {
    "width": (
        lambda folder: edit(folder, hidden_size=10**7, num_attention_heads=4),
        "but config.json implies",
    ),
    "vocabulary": (lambda folder: edit(folder, vocab_size=4096), "but config.json implies"),
    "more layers": (lambda folder: edit(folder, num_hidden_layers=9), "declares 9 layers"),
    "another family": (
        lambda folder: edit(folder, architectures=["Qwen3ForCausalLM"]),
        "which config.json requires",
    ),
    "header without end": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64),
        "is not a complete safetensors file",
    ),
    "truncated": (
        lambda folder: os.truncate(folder / "model.safetensors", 4000),
        "is not a complete safetensors file",
    ),
    "nested header": (
        lambda folder: edit_header(folder, b'{"a":' * 10_000),
        "is not a complete safetensors file",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "another format": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "has neither model.safetensors nor model.safetensors.index.json nor a GGUF file",
    ),
    "weights of another folder": (
        lambda folder: index(folder, {"a": "../../etc/passwd"}),
        "the name of a file in the same folder",
    ),
    "missing shard": (
        lambda folder: index(folder, {"a": "model-2.safetensors"}),
        "lists model-2.safetensors, not in the folder",
    ),
    "empty index": (lambda folder: index(folder, {}), "has no weight_map"),
    "no architecture": (
        lambda folder: edit(folder, architectures=["NewModel"]),
        "architecture NewModel is not supported",
    ),
    "quantised": (
        lambda folder: edit(folder, quantization_config={"quant_method": "bitsandbytes"}),
        "quant_method='bitsandbytes' is not supported",
    ),
    "tokenizer of another form": (
        lambda folder: (
            (folder / "tokenizer.json").unlink(),
            (folder / "tokenizer.model").write_text("no model"),
        ),
        "has no tokenizer.json, ",
    ),
}

DISK: Final = {"cpu_bytes_to_use": "8MiB", "disk_path": "/var/tmp/x", "disk_bytes": "32MiB"}


def offloading(**options: Any) -> list[str]:
    return ["--kv-connector", "offloading", "--kv-connector-config", json.dumps(options)]


SETTINGS: Final[list[tuple[list[str], str]]] = [
    (["--port", "70000"], "port=70000 must be between 0 and 65535"),
    (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
    (["--tensor-parallel-size", "3"], "cannot cut num_attention_heads"),
    (["--tensor-parallel-size", "0"], "tensor_parallel_size=0 must be between 1 and 64"),
    (["--pipeline-parallel-size", "64"], "is more than the"),
    (["--decode-context-parallel-size", "2"], "does not divide tensor_parallel_size=1"),
    (["--max-model-len", "999999"], "is more than the 2048 tokens"),
    (["--max-model-len", "2048", "--num-blocks", "3"], "num_blocks=3"),
    (["--num-blocks", "1"], "leaves no block but the null block"),
    (["--num-blocks", "many"], 'unable to convert "many" into int'),
    (["--block-size", "0"], "block_size=0 is not a power of two"),
    (["--block-size", "7"], "block_size=7 is not a power of two"),
    (["--hash-block-size", "5"], "hash_block_size=5 does not divide"),
    (["--dtype", "int8"], 'Invalid value "int8" for --dtype'),
    (["--kv-cache-dtype", "fp4"], 'Invalid value "fp4" for --kv-cache-dtype'),
    (["--device", "tpu"], "device='tpu' is unknown"),
    (["--threads", "0"], "threads=0 must be between"),
    (["--max-num-seqs", "0"], "max_num_seqs=0 must be between"),
    (["--max-num-batched-tokens", "0"], "max_num_batched_tokens=0 must be between"),
    (["--kv-memory-fraction", "2"], "kv_memory_fraction=2.0"),
    (["--scheduling-policy", "best"], "unknown scheduling policy 'best'"),
    (["--preemption-mode", "swap"], "needs a connector that keeps KV in host memory"),
    (["--enable-return-routed-experts"], "this model has no mixture of experts"),
    (["--max-num-encoder-input-tokens", "5"], "this model has no encoder"),
    (["--ec-connector", "x"], "this model has no encoder"),
    (["--kv-connector", "nope"], "--kv-connector nope is unknown"),
    (["--kv-connector", "offloading"], "needs cpu_bytes_to_use"),
    (["--kv-connector", "offloading", "--kv-connector-config", "{"], "is neither a JSON object"),
    (offloading(cpu_bytes_to_use="1KiB"), "cannot hold one block"),
    (offloading(**DISK | {"disk_path": "/etc/passwd"}), "the disk tier cannot use /etc/passwd"),
    (offloading(**DISK | {"disk_path": "/etc/passwd/a"}), "the disk tier cannot use /etc/passwd/a"),
    (offloading(**DISK | {"disk_bytes": "900TiB"}), "is more than the disk"),
    (offloading(**DISK | {"disk_bytes": "1KiB"}), "holds no block"),
    (
        ["--kv-connector", "simple_cpu", "--kv-connector-config", '{"cpu_bytes_to_use": 9}'],
        "the size of one block",
    ),
    (
        ["--kv-connector", "nixl", "--kv-connector-config", '{"host": "no.such.host.invalid"}'],
        "'host' is 'no.such.host.invalid', where this machine cannot listen",
    ),
    (
        ["--kv-connector", "mooncake", "--kv-connector-config", '{"host": "192.0.2.1"}'],
        "'host' is '192.0.2.1', where this machine cannot listen",
    ),
    (["--kv-connector", "example"], "needs the option 'path'"),
    (["--kv-connector", "multi"], "needs 'connectors'"),
    (["--prefill", "1"], "both kinds of engines are needed"),
    (["--prefill", "1", "--decode", "1", "--kv-connector", "simple_cpu"], "does not pull KV"),
    (["--state-dir", "/etc/passwd"], "the state directory /etc/passwd cannot be created"),
    (["--record", "/nope/x"], "record=/nope/x: there is no folder /nope"),
    (["--sched-trace-path", "/tmp"], "sched_trace_path=/tmp is a folder"),
    (["--api-key", ""], "api_key must be one or more keys"),
    (["--api-key-file", "/nope"], "api_key_file=/nope cannot be read"),
    (["--admin-key-file", "/nope"], "admin_key_file='/nope' cannot be read"),
    (["--chat-template", "/nope"], "chat_template: /nope cannot be read"),
    (["--tool-call-parser", "nope"], "unknown parser 'nope'"),
    (["--reasoning-parser", "nope"], "unknown parser 'nope'"),
    (["--served-model-name", ""], "served_model_name must be 1 to 64 names"),
    (["--routing-policy", "best"], 'Invalid value "best" for --routing-policy'),
    (["--replicas", "0"], "replicas=0 must be between"),
    (["--gateways", "0"], "gateways=0 must be between"),
    (["--standby-workers", "-1"], "standby_workers=-1 must be between"),
    (["--startup-timeout-s", "-1"], "startup_timeout_s=-1.0 must be above 0"),
    (["--otlp-traces-endpoint", "nourl"], "is not an HTTP URL"),
    (["--quantization", "awq"], "quantization='awq', but the weights of demo_model are floats"),
    (["--load-format", "other"], 'Invalid value "other" for --load-format'),
    (["--config", "/nope.toml"], "--config /nope.toml cannot be read"),
    (["--topology", "/nope.toml"], "topology /nope.toml cannot be read"),
    (["--nonsense"], "Unknown option: --nonsense"),
]
MODELS: Final = [
    ("/nope", "neither a folder nor a model hub id"),
    ("a/b/c", "neither a folder nor a model hub id"),
    ("/etc/passwd", "is a file; a model must be a folder"),
    ("/etc", "has no config.json"),
]


def index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors").unlink()
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good")
    make_tiny_llama(path, vocab_size=VOCAB_SIZE)
    save_tokenizer(path)
    return path


@pytest.fixture
def folder(good_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_folder, tmp_path / "model"))


class _NotRefused(Exception):
    """The start goes on."""


@pytest.fixture
def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """Run a command, which must end with status 2 and one line: the reason."""

    def go_on() -> None:
        raise _NotRefused

    monkeypatch.setattr(serving, "take_first", go_on)
    monkeypatch.setattr(command, "set_up_logging", lambda *_: None)
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it raises ImportError
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["longshore", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            command.main()
        printed = capsys.readouterr()
        assert ended.value.code == 2, printed.err
        (line,) = (printed.out + printed.err).splitlines()
        assert line.startswith("longshore: error: ")
        return str(line)

    return run


SLOW_TOKENIZER: Final = "exploding normalizers"
EVERY_FOLDER: Final = {**FOLDERS, **TEXT_FILES, **WEIGHTS}


# The one that takes 10 s is started with the command itself.
@pytest.mark.parametrize("name", [name for name in EVERY_FOLDER if name != SLOW_TOKENIZER])
def test_a_folder_that_cannot_be_served_is_refused(
    refusal: Callable[..., str], folder: Path, name: str
) -> None:
    damage, reason = EVERY_FOLDER[name]
    damage(folder)
    assert reason in refusal("serve", folder, "--port", "0")


@pytest.mark.parametrize("name", [*FOLDERS, "no regex", "decoder that grows", "end of no type"])
def test_doctor_says_why_a_folder_cannot_be_served(
    refusal: Callable[..., str], folder: Path, name: str
) -> None:
    damage, reason = EVERY_FOLDER[name]
    damage(folder)
    assert reason in refusal("doctor", "--plan", folder)


@pytest.mark.parametrize(
    ("flags", "reason"), SETTINGS, ids=[" ".join(flags)[:60] for flags, _ in SETTINGS]
)
def test_settings_that_cannot_work_are_refused(
    refusal: Callable[..., str], flags: list[str], reason: str
) -> None:
    port = () if {"--port", "--topology"} & {*flags} else ("--port", "0")
    assert reason in refusal("serve", DEMO_MODEL_DIR, *port, *flags)


@pytest.mark.parametrize(("model", "reason"), MODELS, ids=[model for model, _ in MODELS])
def test_what_is_no_model_is_refused(refusal: Callable[..., str], model: str, reason: str) -> None:
    assert reason in refusal("serve", model)


def test_a_port_that_is_taken_is_refused(refusal: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = refusal("serve", DEMO_MODEL_DIR, "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (open_to_others, "has mode 0777, so other users can write to it. Run: chmod 700 "),
        (os.mkfifo, "the disk tier cannot use "),
    ],
    ids=["open to others", "pipe"],
)
def test_a_disk_path_that_another_user_could_have_planted_is_refused(
    refusal: Callable[..., str], tmp_path: Path, plant: Callable[[Path], None], reason: str
) -> None:
    plant(tmp_path / "tier")
    flags = offloading(**DISK | {"disk_path": str(tmp_path / "tier")})
    assert reason in refusal("serve", DEMO_MODEL_DIR, "--port", "0", *flags)


def test_a_start_that_may_succeed_goes_on(refusal: Callable[..., str], folder: Path) -> None:
    with pytest.raises(_NotRefused):
        refusal("serve", folder, "--port", "0", "--num-blocks", "600")
    assert len(EVERY_FOLDER) + len(SETTINGS) + len(MODELS) >= 60


def test_a_truncated_gguf_file_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes((GGUF_FILES / "llama.gguf").read_bytes()[:60_000])
    assert f"{path} is not a complete GGUF file" in refusal("serve", path, "--port", "0")
