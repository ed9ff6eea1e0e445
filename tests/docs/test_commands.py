"""Every command and every piece of code on the pages works: it is run with a server, or its
arguments are parsed by the program. tests/docs/places.py says which."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError, MissingArgumentError
from cyclopts.config import Toml

from longshore.deploy.cli.main import _settings_file as settings_file
from longshore.deploy.cli.main import app
from longshore.deploy.llm.llm import LLM
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.settings.vllm_names import CONFIGS
from longshore.deploy.supervisor.fork_server import VARIABLE_PREFIX
from longshore.protocol.errors import ConfigError
from tests.conftest import ROOT, load_script
from tests.deploy.sounds import as_file, tone
from tests.deploy.tiny_whisper import make_tiny_whisper
from tests.docs.blocks import (
    Block,
    Command,
    flags_mentioned,
    pages,
    read_blocks,
    read_commands,
)
from tests.docs.places import EXTRA, elsewhere, place_of, server_of, words_of
from tests.integration.deployment import Deployment
from tests.integration.forks import template
from tests.models import make_tiny_llama

URL = "http://127.0.0.1:8000"
# Flags of other programs that the pages name.
OTHERS_FLAGS = {
    "--backend",
    "--chunk-size",
    "--cpus",
    "--ipc",
    "--l2-adapter",
    "--no-deps",
    "--resources",
    "--shm-size",
}


def commands_at(*places: str) -> list[Any]:
    """The commands of these places as parameters of a test, each of them once."""
    found = []
    commands = {each.text.partition("  #")[0].rstrip(): each for each in read_commands()}
    for command in commands.values():
        try:
            place = place_of(command)
        except LookupError:
            continue  # test_every_command_has_a_place reports it
        if place in places:
            id_ = f"{command.place} {command.text[:40]}"
            marks = pytest.mark.slow if {"--machine", "--bandwidth"} & {*command.words} else ()
            found.append(pytest.param(command, id=id_, marks=marks))
    return found


def blocks_in(*languages: str, elsewhere_too: bool = False) -> list[Any]:
    return [
        pytest.param(block, id=block.place)
        for block in read_blocks()
        if block.language in languages and (elsewhere(block) is not None) == elsewhere_too
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The demo model, served as in the quick start."""
    with Deployment(DEMO_MODEL_DIR, tmp_path_factory.mktemp("run")) as deployment:
        yield deployment.wait_until_ready()


def test_the_bundled_model_answers_what_the_quick_start_tells_one_to_type(
    served: Deployment,
) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    said = re.search(r"^you  (.+)\nmodel  (.+)$", page, re.M)
    assert said is not None
    run = subprocess.run(
        [sys.executable, "-m", "longshore.deploy", "chat", "--url", served.url],
        input=f"{said[1]}\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stdout.strip()) == (0, said[2]), run.stderr


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose cache can be planned for any length."""
    path = tmp_path_factory.mktemp("long")
    make_tiny_llama(path, max_position_embeddings=1 << 20)
    return path


@pytest.fixture(scope="module")
def whisper_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    make_tiny_whisper(path)
    return path


@pytest.fixture(scope="module")
def speech(whisper_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(whisper_dir, tmp_path_factory.mktemp("run")) as deployment:
        yield deployment.wait_until_ready()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's working folder, which has the files that the pages mention."""
    (tmp_path / "speech.mp3").write_bytes(as_file(tone(3.0), kind="MP3"))
    (tmp_path / ".curlrc").write_text("fail-with-body\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO_MODEL_DIR, device="cpu", num_blocks=600, threads=1) as shared:
        yield shared


@pytest.mark.parametrize("command", [pytest.param(each, id=each.place) for each in read_commands()])
def test_every_command_has_a_place(command: Command) -> None:
    assert place_of(command)


def test_every_block_is_of_a_language_that_is_looked_at() -> None:
    for block in read_blocks():
        assert block.language not in {"bash", "console", "py", "python3", "shell"}, (
            f"{block.place}: say sh, python or toml, which are run"
        )
        assert block.language or not re.match(r"(\.venv/bin/)?longshore \w", block.text), (
            f"{block.place}: commands go into a block of sh"
        )


def parse(words: list[str], *, settings: tuple[Toml, ...] = ()) -> None:
    """Parse with the real parser, which creates the settings and validates their values."""
    before, app.config = app.config, settings
    try:
        app.parse_args(words, exit_on_error=False, print_error=False)
    finally:
        app.config = before


@pytest.mark.parametrize("command", commands_at("parsed", "run"))
def test_command_line_is_one_that_longshore_takes(command: Command) -> None:
    words = [word for word in words_of(command)[1:] if word != "--help"]
    if words_of(command)[0] == "curl":
        return
    if words[:1] == ["help"]:
        del words[0]
    if "--config" in words:
        del words[words.index("--config") : words.index("--config") + 2]
    try:
        parse(words)
    except MissingArgumentError:
        assert not command.is_block
        parse([*words, "x"])  # a sentence may name a flag without its value


@pytest.mark.parametrize(
    "words", ["--no-such-flag 1", "--dtype float3", "--port many", "--num-blocks 0", "--plan MODEL"]
)
def test_parser_rejects_what_longshore_does_not_take(words: str) -> None:
    with pytest.raises((CycloptsError, ConfigError)):
        parse(["serve", *words.split()])


def test_settings_that_nothing_reads_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[serve]\nspeed = 1\n")
    with pytest.raises(CycloptsError, match="speed"):
        parse(["serve"], settings=(settings_file(path),))


def test_an_unknown_program_needs_a_place() -> None:
    with pytest.raises(LookupError, match="add it to"):
        place_of(Command("docs/x.md:1", "make coffee", is_block=True))


def run_in_shell(
    command: Command, url: str, folder: Path, model: Path
) -> subprocess.CompletedProcess[str]:
    text = command.text.replace(URL, url).replace(".venv/bin/", "")
    text = re.sub(r"\bMODEL\b|path/to/model", str(model), text)
    text = re.sub(r"--num-prompts \d+", "--num-prompts 10", text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    defaults = {"URL": url, "NUM_LOOKS": "1"}
    return subprocess.run(
        ["bash", "-ec", text],
        cwd=folder,
        env={
            **os.environ,
            **{VARIABLE_PREFIX + name: value for name, value in defaults.items()},
            "PATH": path,
            "CURL_HOME": str(folder),
        },
        input="C417 B42 red C009 B13 blue Where is C417?\n",  # a chat sends it as a message
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("command", commands_at("run"))
def test_command_runs_against_a_server(
    command: Command, request: pytest.FixtureRequest, folder: Path, long_model: Path
) -> None:
    server: Deployment = request.getfixturevalue(server_of(command.text))
    ran = run_in_shell(command, server.url, folder, long_model)
    may_find_fault = "--machine" in command.words  # depends on the machine that runs the tests
    assert ran.returncode in ({0, 1} if may_find_fault else {0}), ran.stdout + ran.stderr
    assert ran.stdout


@pytest.mark.parametrize("block", blocks_in("python"))
def test_python_block_runs(block: Block, request: pytest.FixtureRequest, folder: Path) -> None:
    source = block.text
    names: dict[str, Any] = {"samples": tone(1.0)}
    if URL in source:
        source = source.replace(URL, request.getfixturevalue(server_of(source)).url)
    if re.search(r"\bllm\.", source) and " as llm" not in source:
        names |= {"llm": request.getfixturevalue("llm"), "prompts": ["Where is C417?"]}
    few = "" if "num_blocks" in source else ", num_blocks=600"
    for stands_in, model in (("path/to/model", DEMO_MODEL_DIR), ("path/to/whisper", None)):
        if f'LLM("{stands_in}"' in source:
            model = model or request.getfixturevalue("whisper_dir")
            mine = f'LLM({str(model)!r}, device="cpu", threads=1{few}'
            source = source.replace(f'LLM("{stands_in}"', mine)
    exec(compile(source, block.place, "exec"), names)


@pytest.mark.parametrize("block", blocks_in("toml"))
def test_settings_file_is_one_that_every_command_takes(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(block.text.replace("path/to/model", str(DEMO_MODEL_DIR)))
    tables = tomllib.loads(block.text)
    for name, _ in load_script("reference").commands():
        top, *rest = name.split()
        table = tables.get(top, {}).get(rest[0]) if rest else tables.get(top)
        if isinstance(table, dict):
            parse(name.split(), settings=(settings_file(path),))


@pytest.mark.parametrize("block", blocks_in("python", "toml", elsewhere_too=True))
def test_block_has_a_test_of_its_own(block: Block) -> None:
    test = elsewhere(block)
    assert test is not None
    assert block.page.name in (ROOT / test).read_text(encoding="utf-8")
    if block.language == "toml":
        tomllib.loads(block.text)


@pytest.mark.parametrize("command", commands_at("extra"))
def test_extra_exists(command: Command) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    match = EXTRA.fullmatch(command.text)
    assert match is not None
    assert match["extra"] in project["optional-dependencies"]


def test_pages_install_the_distribution() -> None:
    """Its name is stated in pyproject.toml; the package `longshore` of PyPI is another project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        names = {match["name"] for match in EXTRA.finditer(text)} - {"."}
        assert names <= {project["name"]}, page
        assert not re.search(r"pip install '?longshore\b(?!-)", text), page


@pytest.mark.parametrize("command", commands_at("program"))
def test_program_exists_and_knows_its_flags(command: Command) -> None:
    words = words_of(command)
    program, *arguments = words[1:] if words[0] == "python" else words
    path = ROOT / program
    assert path.exists()
    if path.is_dir():
        return
    text = path.read_text(encoding="utf-8")
    for other in path.parent.glob("*.py"):  # what it imports or runs
        if re.search(rf"\b(import|from|{path.parent.name}/) ?{other.stem}\b", text):
            text += other.read_text(encoding="utf-8")
    for flag in arguments:
        assert not flag.startswith("--") or flag in text, f"{program} has no {flag}"


@cache
def help_of(program: str) -> str:
    status, said = template().run([str(ROOT / program), "--help"], dict(os.environ), 60)
    assert status == 0, said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_at("program"))
def test_benchmark_lists_its_flags_in_its_help(command: Command) -> None:
    words = words_of(command)
    program, *arguments = words[1:] if words[0] == "python" else words
    flags = [argument for argument in arguments if argument.startswith("--")]
    if flags and program.endswith(".py") and not program.startswith("benchmarks/peers/"):
        said = help_of(program)
        assert all(flag in said for flag in flags)


def test_every_flag_that_a_page_names_exists() -> None:
    known = (
        set(OTHERS_FLAGS)
        | {f"--{name.replace('_', '-')}" for name in CONFIGS}
        | {"--help", "--version", "--config"}
    )
    for _, command in load_script("reference").commands():
        for argument in command.assemble_argument_collection():
            known.update(argument.names)
    programs = [*(ROOT / "scripts").iterdir(), *(ROOT / "benchmarks").rglob("*.py")]
    sources = "".join(path.read_text("utf-8") for path in programs if path.is_file())
    for flag, place in flags_mentioned().items():
        assert flag in known or flag in sources, f"{place} names {flag}, which nothing has"


def test_every_variable_that_a_page_names_is_a_setting() -> None:
    known = set()
    for _, command in load_script("reference").commands():
        for argument in command.assemble_argument_collection():
            name = argument.names[0].removeprefix("--")
            known.add(VARIABLE_PREFIX + name.replace("-", "_").upper())
    for page in pages():
        named = re.findall(r"\bLONGSHORE_[A-Z_]+\b", page.read_text(encoding="utf-8"))
        assert set(named) <= known, page
