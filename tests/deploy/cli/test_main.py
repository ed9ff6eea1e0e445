"""The command line: what it rejects, and that it imports little."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from longshore import __version__ as version
from longshore.deploy.cli.main import app
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.integration.forks import template

LOADED = (
    "import sys, longshore.deploy.cli.main; "
    "print({'torch', 'starlette', 'numpy'} & set(sys.modules))"
)


class Run(NamedTuple):
    """How a command has ended. printed: on both streams."""

    status: int
    printed: str


def longshore(*arguments: str, **environment: str) -> Run:
    return Run(*template().run(["longshore.deploy", *arguments], os.environ | environment, 60))


def run_here(*arguments: str) -> str:
    """What a command prints, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        app.meta([*arguments])
    return printed.getvalue()


def test_command_line_loads_neither_torch_nor_a_server() -> None:
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() in ("set()", "{'numpy'}"), run.stdout + run.stderr


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_the_version_is_printed(flag: str) -> None:
    assert run_here(flag) == f"{version}\n"


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        (["help"], ["--help"]),
        (["help", "top"], ["top", "--help"]),
        (["help", "kv", "ls"], ["kv", "ls", "--help"]),
    ],
    ids=str,
)
def test_help_is_a_command_too(asked: list[str], flag: list[str]) -> None:
    assert run_here(*asked) == run_here(*flag) != ""


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_a_shell_gets_a_script_with_commands_and_flags(shell: str, tmp_path: Path) -> None:
    script = run_here("completion", shell)
    for name in ("serve", "fit-cost", "max-model-len", "num-prompts"):
        assert name in script
    if shell == "bash":
        (tmp_path / "script").write_text(script)
        subprocess.run(["bash", "-n", tmp_path / "script"], check=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "serve", "--backend", "openai-chat"], ["openai-chat", "only completions take"]),
        (["bench", "serve", "--endpoint", "/v1/chat/completions"], ["Use /v1/completions"]),
        (
            ["bench", "serve", "--backend", "vllm", "--base-url", "ftp://a", "--num-prompts", "1"],
            ["url='ftp://a'"],
        ),
        (["serve", "--dtype", "int8"], ["--dtype", "bfloat16"]),
        (["serve", "--num-blocks", "many"], ["--num-blocks", "many"]),
        (["serve", "--no-such-flag"], ["--no-such-flag"]),
        (["serve", "--device", "tpu"], ["device='tpu'", "cuda"]),
        (
            ["serve", "/no/such/folder"],
            ["/no/such/folder", "is neither a folder nor a model hub id"],
        ),
        (["serve", "--scheduling-policy", "random"], ["scheduling_policy='random'", "continuum"]),
        (["serve", "--watermark", "1.5"], ["watermark=1.5"]),
        (["serve", "--load-failure-policy", "hope"], ["--load-failure-policy", "recompute"]),
        (["serve", "--max-loras", "2"], ["--max-loras"]),
        (
            ["serve", "--gpu_memory_utilization=0.9", "--kv-memory-fraction=0.5"],
            ["gpu_memory_utilization=0.9", "kv_memory_fraction=0.5", "Give one of them"],
        ),
        (["serve", "--max-model-len", "1.5"], ["--max-model-len", "32k (32,000)"]),
        (["serve", "--num-speculative-tokens", "2"], ["--num-speculative-tokens"]),
        (
            ["serve", "--max-num-encoder-input-tokens", "2"],
            ["max_num_encoder_input_tokens=2", "no encoder"],
        ),
        (["serve", "--max-audio-mib", "0"], ["max_audio_mib=0"]),
        (["serve", "--max-audio-s", "-1"], ["max_audio_s=-1"]),
        (
            ["serve", "--port", "0", "--num-blocks", "200", "--kv-connector", "no_such:At"],
            ["--kv-connector no_such:At", "no module no_such"],
        ),
        (
            [
                *("serve", "--port", "0", "--num-blocks", "200"),
                *("--kv-connector", "longshore.connectors.base:SchedulerConnector"),
            ],
            ["--kv-connector longshore.connectors.base:SchedulerConnector", "has no worker half"],
        ),
        (["doctor", "--url", "nowhere"], ["url='nowhere'"]),
        (["doctor", "--engine", "nowhere"], ["url='nowhere'"]),
        (["doctor", "--engine", "http://127.0.0.1:9"], ["unreachable", "longshore serve"]),
        (["doctor", "--stall-after-s", "0"], ["stall_after_s=0"]),
        (["bench", "throughput", "--num-prompts", "0"], ["num_prompts=0"]),
        (["bench", "throughput", "--input-len", "5000"], ["input_len=5000", "2048"]),
        (["bench", "throughput", "--json", "/no/such/x.json"], ["/no/such/x.json", "written"]),
        (["bench", "serve", "--json", "/no/such/x.json"], ["/no/such/x.json", "written"]),
        (["bench", "serve", "--request-rate", "-1"], ["request_rate=-1"]),
        (["bench", "serve", "--url", "http://127.0.0.1:9"], ["Is a server running there?"]),
        (["bench", "serve", "--url", "nowhere"], ["url='nowhere'"]),
    ],
)
def test_wrong_value_is_rejected_by_name_without_a_traceback(
    arguments: list[str], words: list[str]
) -> None:
    run = longshore(*arguments)
    assert run.status != 0
    printed = " ".join(run.printed.split())
    assert "Traceback" not in printed
    for word in words:
        assert word in printed


def test_a_setting_comes_from_its_flag_else_a_variable_else_the_file_else_a_default(
    tmp_path: Path,
) -> None:
    file = tmp_path / "longshore.toml"
    file.write_text("[serve]\nmax-num-seqs = 0\n[bench.throughput]\nnum-prompts = 0\n")
    variable = {"LONGSHORE_MAX_NUM_SEQS": "-1"}
    for arguments, environment, said in (
        (["--max-num-seqs", "-2"], variable, "max_num_seqs=-2"),
        ([], variable, "max_num_seqs=-1"),
        ([], {}, "max_num_seqs=0"),
    ):
        run = longshore("serve", "--config", str(file), *arguments, **environment)
        assert run.status == 2
        assert said in run.printed
    assert "num_prompts=0" in longshore("--config", str(file), "bench", "throughput").printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve]\nno-such = 1\n", ["no-such"]),
        ("[serve\n", ["--config", "cannot be read"]),
        ("[serve]\nport = 'http'\n", ["port", "http"]),
        ("num-blocks = 5\n", ["num-blocks is not a command's table", "[bench.serve]"]),
        ("api-key = ['k']\n[serve]\n", ["api-key is not a command's table"]),
        ("[srve]\nnum-blocks = 5\n", ["srve is not a command's table"]),
        ("[bench.srve]\n", ["bench.srve is not a command's table"]),
        ("[serve]\nno-enable-prefix-caching = true\n", ["enable-prefix-caching = false"]),
        ("[serve]\napi-key = []\n", ["api_key", "Remove it"]),
        ("[serve]\napi-key = ['two words']\n", ["api_key", "spaces"]),
        ("[serve]\ncors-allow-origins = ['https://a/']\n", ["cors_allow_origins", "path"]),
        ("[serve]\ncors-allow-origins = ['example.org']\n", ["cors_allow_origins", "SCHEME"]),
        ("[serve]\nallowed-hosts = ['http://a']\n", ["allowed_hosts", "without scheme"]),
        ("[serve]\nallowed-hosts = ['a:80']\n", ["allowed_hosts", "port"]),
        (None, ["--config", "No such file"]),
        ("pipe", ["--config", "cannot be read", "it is not a regular file"]),
    ],
)
def test_a_settings_file_that_makes_no_sense_is_rejected(
    tmp_path: Path, text: str | None, words: list[str]
) -> None:
    file = tmp_path / "longshore.toml"
    if text == "pipe":
        os.mkfifo(file)
    elif text is not None:
        file.write_text(text)
    run = longshore("serve", "--config", str(file))
    assert run.status != 0
    printed = " ".join(run.printed.split())
    assert "Traceback" not in printed
    for word in words:
        assert word in printed


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("LONGSHORE_API_KEY", "", "LONGSHORE_API_KEY is set but empty"),
        ("LONGSHORE_API_KEY", " ", "LONGSHORE_API_KEY is set but empty"),
        ("LONGSHORE_NO_ENABLE_PREFIX_CACHING", "1", "LONGSHORE_ENABLE_PREFIX_CACHING=false"),
    ],
)
def test_a_variable_that_would_be_passed_over_is_rejected(
    variable: str, value: str, words: str
) -> None:
    run = longshore("serve", "/no/such/folder", **{variable: value})
    assert run.status == 2
    assert words in run.printed


def test_a_node_takes_no_settings_from_variables(tmp_path: Path) -> None:
    arguments = ("node", "--name", "a", "--check")
    run = longshore(*arguments, "--topology", "t.toml", LONGSHORE_API_KEY_FILE="keys.toml")
    assert run.status == 2
    assert "LONGSHORE_API_KEY_FILE is set, but all settings of a node come from" in run.printed
    file = tmp_path / "topology.toml"
    file.write_text(
        f'[settings]\nstate_dir = "{tmp_path}/state"\n[nodes.a]\naddress = "127.0.0.1"\n'
        '[[engines]]\nnode = "a"\n[[gateways]]\nnode = "a"\nport = 8000\n'
    )
    variables = {"LONGSHORE_API_KEY": "k", "LONGSHORE_TOPOLOGY": str(file), "LONGSHORE_URL": "u"}
    run = longshore(*arguments, **variables)
    assert (run.status, "the topology is valid" in run.printed) == (0, True), run.printed


def test_variables_for_serving_do_not_keep_doctor_from_asking() -> None:
    run = longshore(
        "doctor",
        "--engine",
        "http://127.0.0.1:9",
        LONGSHORE_DEVICE="auto",
        LONGSHORE_BLOCK_SIZE="0",
    )
    assert "unreachable" in run.printed


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        (["--url", "http://127.0.0.1:9"], {}),
        ([], {"LONGSHORE_URL": "http://127.0.0.1:9"}),
        (["--engine", "http://127.0.0.1:9"], {}),
        ([], {"LONGSHORE_ENGINE": "http://127.0.0.1:9"}),
    ],
)
def test_doctor_takes_an_address_as_the_other_commands_do_and_as_it_used_to(
    arguments: list[str], variable: dict[str, str]
) -> None:
    assert "'127.0.0.1', 9" in longshore("doctor", *arguments, **variable).printed


def test_a_variable_that_no_command_reads_is_warned_of_with_the_one_that_is_meant() -> None:
    variables = {
        "LONGSHORE_PROT": "9000",
        "LONGSHORE_FROBNICATE": "1",
        "LONGSHORE_NUM_PROMPTS": "5",
    }
    run = subprocess.run(
        [*(sys.executable, "-m", "longshore.deploy"), *("doctor", "--url", "http://127.0.0.1:9")],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stderr.splitlines() == [
        "longshore: warning: unknown variables: LONGSHORE_FROBNICATE, "
        "LONGSHORE_PROT (did you mean LONGSHORE_PORT?)"
    ]
    assert run.returncode == 2


def test_help_calls_the_model_a_model() -> None:
    first = longshore("serve", "--help").printed.splitlines()[0]
    assert first == "Usage: longshore serve [OPTIONS] [MODEL ...]"


def test_models_are_given_in_one_way(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text("[[models]]\nmodel = 'a'\n")
    both = longshore("serve", "b", "--models", str(file))
    assert (both.status, "MODEL is b, and --models" in both.printed) == (2, True)
    named = longshore("serve", "a", "b", "--served-model-name", "c")
    assert "served_model_name is a setting of one model, and 2 are given" in named.printed
    with_topology = longshore("serve", "a", "b", "--topology", str(file))
    assert "2 models are given, and a topology has one" in with_topology.printed
    with_topology = longshore("serve", "--models", str(file), "--topology", str(file))
    assert "--models and --topology are both given" in with_topology.printed


def test_help_names_every_flag_with_what_it_does() -> None:
    run = longshore("serve", "--help")
    assert run.status == 0
    for flag in ("--no-async-scheduling", "--max-num-batched-tokens", "--drain-timeout-s"):
        assert flag in run.printed
    assert "power of two" in run.printed
    assert str(DEMO_MODEL_DIR.parent) not in "".join(run.printed.split())
    assert "the bundled demo model]" in " ".join(run.printed.replace("│", " ").split())


def test_help_puts_every_setting_under_a_heading() -> None:
    first, *sections = longshore("serve", "--help").printed.split("╭─ ")[1:]
    assert {line.split()[1] for line in first.splitlines() if "│ --" in line} == {"--config"}
    headings = [section.partition(" ─")[0] for section in sections]
    assert headings == [
        "Model", "Server", "KV cache", "Scheduling", "Speculative decoding", "Several workers",
        "Several hosts", "KV beyond the device", "KV events", "Operation",
    ]  # fmt: skip
