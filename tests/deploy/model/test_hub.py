"""Models by hub id, downloaded with the real client from a small hub on the loopback interface."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.model.hub import model_name, resolve_model
from longshore.protocol.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "README.md": b"not needed",
    "onnx/model.json": b"another format",
}


class Hub:
    """Serves one repository, `own/er`. `close` may be called twice.
    num_requests: the number of requests to the hub.
    """

    def __init__(self) -> None:
        hub = self
        self.files = FILES
        self.num_requests = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        self.num_requests += 1
        path = request.path.partition("?")[0]
        if path.startswith("/api/models/own/er/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": f"{index:040x}"}
                for index, (name, content) in enumerate(self.files.items())
            ]
            content = json.dumps(tree).encode()
        elif path.startswith("/api/models/own/er"):
            siblings = [{"rfilename": name} for name in self.files]
            content = json.dumps({"id": "own/er", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith(f"/own/er/resolve/{COMMIT}/"):
            content = self.files[path.removeprefix(f"/own/er/resolve/{COMMIT}/")]
        else:
            request.send_response(404)
            request.send_header("X-Error-Code", "RepoNotFound")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.end_headers()
        if body:
            request.wfile.write(content)

    def close(self) -> None:
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
        self.server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.close()


def resolve(model: str, *, endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """`resolve_model` in a separate interpreter, because the client reads its settings when
    imported."""
    program = (
        "import sys; from longshore.deploy.model.hub import resolve_model\n"
        "from longshore.protocol.errors import ConfigError\n"
        "try: print(resolve_model(sys.argv[1]))\n"
        "except ConfigError as error: sys.exit(str(error))"
    )
    return run(program, model, endpoint=endpoint, cache=cache)


def run(
    program: str, model: str, *, endpoint: str, cache: Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """In an interpreter whose model hub is `endpoint`."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-c", program, model],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_hub_id_is_fetched_once_and_then_found_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    first = resolve("own/er", endpoint=hub.url, cache=tmp_path)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {
        "config.json",
        "model.safetensors",
    }
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    hub.close()
    again = resolve("own/er", endpoint=hub.url, cache=tmp_path)
    assert again.stdout.strip() == str(folder), again.stderr


GGUF_FILES = {
    "README.md": b"not needed",
    "Model-7B-Q4_K_M.gguf": b"four bits",
    "Model-7B-Q8_0-00001-of-00002.gguf": b"eight bits",
    "Model-7B-Q8_0-00002-of-00002.gguf": b"of them the second half",
    "BF16/Model-7B-BF16.gguf": b"sixteen bits",
    "mmproj-Model-7B-F16.gguf": b"an encoder of images",
}


def fetched_from(hub: Hub, model: str, cache: Path) -> dict[str, bytes]:
    """What is in the cache after a GGUF file, which comes first, was resolved."""
    result = resolve(model, endpoint=hub.url, cache=cache)
    assert result.returncode == 0, result.stderr
    file = Path(result.stdout.strip())
    assert file.suffix == ".gguf"
    folder = next(path for path in file.parents if path.name == COMMIT)
    files = [file, *(path for path in sorted(folder.rglob("*")) if path.is_file() and path != file)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("asked", "files"),
    [
        (":Q4_K_M", ["Model-7B-Q4_K_M.gguf"]),
        (":q8_0", [f"Model-7B-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)]),
        (":Model-7B-BF16.gguf@main", ["BF16/Model-7B-BF16.gguf"]),
    ],
)
def test_a_gguf_file_of_the_hub_is_chosen_by_the_end_of_its_name(
    hub: Hub, tmp_path: Path, asked: str, files: list[str]
) -> None:
    """Of a repository that has safetensors files, too."""
    hub.files = {**FILES, **GGUF_FILES}
    got = fetched_from(hub, f"hf.co/own/er{asked}", tmp_path)
    assert list(got.items()) == [(name, GGUF_FILES[name]) for name in files]
    hub.close()
    assert fetched_from(hub, f"own/er{asked}", tmp_path) == got


def test_the_only_gguf_file_of_a_repository_needs_no_name(hub: Hub, tmp_path: Path) -> None:
    mine = ("README.md", "Model-7B-Q4_K_M.gguf", "mmproj-Model-7B-F16.gguf")
    hub.files = {name: GGUF_FILES[name] for name in mine} | {"params.json": b"{}"}
    got = fetched_from(hub, "own/er", tmp_path)
    assert got == {"Model-7B-Q4_K_M.gguf": b"four bits", "params.json": b"{}"}
    hub.close()
    assert fetched_from(hub, "own/er", tmp_path) == got


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            "",
            "own/er has 3 models in GGUF files (BF16, Q4_K_M, Q8_0). Choose one by the end of its "
            "name, such as own/er:BF16",
        ),
        (":M", "GGUF files (BF16, Q4_K_M, Q8_0), and 0 of them end in M. Choose one"),
    ],
)
def test_which_gguf_files_there_are_is_said_if_the_one_to_serve_is_not_clear(
    hub: Hub, tmp_path: Path, asked: str, message: str
) -> None:
    hub.files = GGUF_FILES
    result = resolve(f"own/er{asked}", endpoint=hub.url, cache=tmp_path)
    assert message in result.stderr
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_repository_without_gguf_files_has_none_to_choose(hub: Hub, tmp_path: Path) -> None:
    result = resolve("own/er:Q4_0", endpoint=hub.url, cache=tmp_path)
    assert "own/er has no GGUF file, so it is served without :Q4_0\n" in result.stderr
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"weights"}
    result = resolve("own/er", endpoint=hub.url, cache=tmp_path / "other")
    assert {path.name for path in Path(result.stdout.strip()).iterdir()} == {"config.json"}


def test_a_model_that_the_hub_does_not_have_is_rejected_by_its_name(
    hub: Hub, tmp_path: Path
) -> None:
    result = resolve("no/body", endpoint=hub.url, cache=tmp_path)
    assert result.returncode == 1
    assert "no/body is not a local folder, and the model hub rejected the request" in result.stderr
    other = resolve("no/body:Q4_0", endpoint=hub.url, cache=tmp_path)
    assert other.stderr == result.stderr


def test_without_a_hub_and_without_an_earlier_download_the_error_says_so(tmp_path: Path) -> None:
    for model in ("own/er", "own/er:Q4_0"):
        result = resolve(model, endpoint="http://127.0.0.1:9", cache=tmp_path)
        assert result.returncode == 1
        assert "the model hub cannot be reached" in result.stderr


WITHOUT_NETWORK = """
import sys

def forbid(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        sys.exit(f"{event}{arguments}")
    if event in ("socket.connect", "socket.bind", "socket.sendto"):
        if isinstance(arguments[1], tuple):  # a path is of this machine
            sys.exit(f"{event} {arguments[1]}")

sys.addaudithook(forbid)
from longshore import LLM, SamplingParams

with LLM(sys.argv[1], in_process=True, num_blocks=300, threads=1) as llm:
    (output,) = llm.generate("C417", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
print(len(output.outputs[0].token_ids), "huggingface_hub" in sys.modules)
"""


def test_a_local_folder_is_loaded_and_computed_without_a_network_though_a_hub_has_its_name(
    hub: Hub, tmp_path: Path
) -> None:
    shutil.copytree(DEMO_MODEL_DIR, tmp_path / "own" / "er")
    result = run(WITHOUT_NETWORK, "own/er", endpoint=hub.url, cache=tmp_path, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "2 False\n"), result.stderr
    assert hub.num_requests == 0


def test_the_same_program_is_stopped_where_it_would_ask_the_hub(hub: Hub, tmp_path: Path) -> None:
    result = run(WITHOUT_NETWORK, "own/er", endpoint=hub.url, cache=tmp_path, cwd=tmp_path)
    assert result.returncode == 1
    assert "socket." in result.stderr
    assert hub.num_requests == 0


def test_requests_call_a_model_by_its_id_or_by_the_name_of_its_folder(tmp_path: Path) -> None:
    assert model_name("own/er") == model_name("own/er@main") == "own/er"
    assert model_name("own/er:Q4_0@main") == "own/er:Q4_0"
    (tmp_path / "mine").mkdir()
    assert model_name(tmp_path / "mine") == model_name(f"{tmp_path}/mine/../mine") == "mine"


@pytest.mark.parametrize("model", ["nowhere", "/nowhere/at/all", "a/b/c", "../up", "a/b@"])
def test_what_is_neither_a_folder_nor_an_id_is_rejected(model: str) -> None:
    with pytest.raises(ConfigError, match=r"is neither a folder nor a model hub id"):
        resolve_model(model)
