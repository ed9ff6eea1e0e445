"""From the command to the first request: progress reports, and the output when the server is
ready."""

import fcntl
import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from tests.deploy.tiny_tokenizer import BOS, EOS, byte_level_tokenizer
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.models import SHAPE

SHARE_OF_MEMORY: Final = 0.0005
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2}
MAX_NEW_TOKENS: Final = 7
PENALTY: Final = 1.3

# A family from another package, whose weights and whose first step take as long as a process holds
# the locks in $LOCKS.
SLOW_FAMILY: Final = {
    "slow_config.py": """
from longshore.worker.models.llama_config import LlamaConfig

class SlowConfig(LlamaConfig):
    model = "slow_llama:SlowLlama"
""",
    "slow_llama.py": """
import fcntl, os
from longshore.worker.models.llama import Llama

class SlowLlama(Llama):
    def loaded(self):
        self.wait_for(f"load-{self.parallel.shard}")
        super().loaded()

    def forward(self, *inputs, **parameters):
        self.wait_for("step")
        return super().forward(*inputs, **parameters)

    def wait_for(self, lock):
        with open(os.path.join(os.environ["LOCKS"], lock)) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
""",
    "slow-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n",
    "slow-1.0.dist-info/entry_points.txt": (
        "[longshore.models]\nSlowLlamaForCausalLM = slow_config:SlowConfig\n"
    ),
}


def copy_of(model_dir: Path, folder: Path, **changes: dict[str, Any]) -> Path:
    """changes: fields of JSON files, by the file's name without its suffix."""
    shutil.copytree(model_dir, folder)
    for name, fields in changes.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def get(url: str) -> tuple[int, str]:
    """Status and body; 0 while no server listens."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[str], Callable[[], None]]]:
    """`hold(lock)` takes one of the slow family's locks, and returns a function that releases
    it."""
    with ExitStack() as held:

        def take(name: str) -> Callable[[], None]:
            file = held.enter_context((tmp_path / name).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            return file.close

        yield take


def test_until_every_rank_is_warm_it_is_told_what_each_of_them_does(
    start_deployment: StartDeployment,
    hold: Callable[[str], Callable[[], None]],
    tiny_model: tuple[Path, Any],
    tmp_path: Path,
) -> None:
    for name, text in SLOW_FAMILY.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    model_dir = copy_of(
        tiny_model[0], tmp_path / "slow", config={"architectures": ["SlowLlamaForCausalLM"]}
    )
    let_0_load, let_1_load, let_them_step = hold("load-0"), hold("load-1"), hold("step")
    search_path = os.pathsep.join(
        [str(tmp_path / "package"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    deployment = start_deployment(
        "--tensor-parallel-size",
        "2",
        model_dir=model_dir,
        environment={"LOCKS": str(tmp_path), "PYTHONPATH": search_path},
    )
    wait_until(lambda: "starting at" in deployment.output)
    (url,) = re.findall(r"starting at (\S+) ", deployment.output)

    def told(text: str) -> bool:
        status, body = get(f"{url}/ready")
        assert status in (0, 503), body
        return text in body

    wait_until(lambda: told("worker 1 (loading shard 2 of 2 of slow on cpu)"))
    wait_until(lambda: told("worker 0 (loading shard 1 of 2 of slow on cpu)"))
    assert get(f"{url}/health")[0] == 200
    let_1_load()
    wait_until(lambda: told("worker 1 (loaded; waiting for the scheduler's handshake)"))
    assert told("worker 0 (loading shard 1 of 2 of slow on cpu)")
    let_0_load()
    wait_until(lambda: told("worker 0 (warming up), worker 1 (warming up)"))
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.InternalServerError, match="still starting; /ready shows"),
    ):
        client.completions.create(model="slow", prompt="x")
    assert "ready at" not in deployment.output
    let_them_step()
    deployment.wait_until_ready()
    assert get(f"{url}/ready") == (200, "ready\n")
    assert printed_num_blocks(deployment, "float32", num_shards=2) == 600


# What is printed


def test_blocks_and_their_bytes_are_printed(deployment: Deployment) -> None:
    assert printed_num_blocks(deployment, "float32") == 600


def test_as_many_blocks_as_fit_a_share_of_the_memory_are_printed_with_their_bytes(
    start_deployment: StartDeployment,
) -> None:
    """With two ranks; a test below has one."""
    deployment = start_deployment(
        "--tensor-parallel-size",
        "2",
        "--dtype",
        "bfloat16",
        "--kv-memory-fraction",
        str(SHARE_OF_MEMORY),
        "--log-level",
        "debug",
        num_blocks=None,
    ).wait_until_ready()
    check_printed_share_of_memory(deployment, "bfloat16", num_shards=2)


def check_printed_share_of_memory(
    deployment: Deployment, dtype: str, *, num_shards: int = 1
) -> None:
    """The minimum of what the ranks measure, which they report in GiB with two decimals."""
    num_blocks = printed_num_blocks(deployment, dtype, num_shards=num_shards)
    left_gib = [float(gib) for gib in re.findall(r"(\S+) GiB of memory free", deployment.output)]
    assert len(left_gib) == num_shards
    fewest, most = (
        int(SHARE_OF_MEMORY * (min(left_gib) + rounding) * 2**30) // block_bytes(dtype, num_shards)
        for rounding in (-0.005, 0.005)
    )
    assert fewest <= num_blocks <= most


def block_bytes(dtype: str, num_shards: int) -> int:
    """Bytes of a block of 16 tokens: keys and values of every layer and head of a rank."""
    head_dim = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    num_heads = SHAPE["num_key_value_heads"] // num_shards
    return int(2 * 16 * num_heads * head_dim * DTYPE_BYTES[dtype] * SHAPE["num_hidden_layers"])


def printed_num_blocks(deployment: Deployment, dtype: str, *, num_shards: int = 1) -> int:
    """The number of blocks in the last lines of the start. Checks all other numbers in them."""
    lines = deployment.output.splitlines()
    (ready,) = (line for line in lines if "ready at" in line)
    (line,) = (line for line in lines if "KV cache: " in line and "supervisor" in line)
    found = re.search(r"a KV cache of ([\d,]+) tokens, 4,096 per request\)$", ready)
    assert found is not None, ready
    num_tokens = int(found[1].replace(",", ""))
    found = re.search(r"KV cache: ([\d,]+) blocks of 16 tokens, ", line)
    assert found is not None, line
    num_blocks = int(found[1].replace(",", ""))
    assert num_tokens == (num_blocks - 1) * 16
    size = block_bytes(dtype, num_shards)
    where = "" if num_shards == 1 else f" on each of {num_shards} workers"
    total = f"{num_blocks:,} x {size:,} = {num_blocks * size:,} bytes"
    assert line.endswith(f"blocks of 16 tokens, {total}{where}")
    return num_blocks


def test_a_newcomer_gets_at_most_ten_lines_with_the_ways_in_last(deployment: Deployment) -> None:
    start, _, _ = deployment.output.partition("longshore: chat: ")
    lines = [line for line in start.splitlines() if "still starting after" not in line]
    assert len(lines) <= 9, deployment.output
    assert "starting at http://127.0.0.1:" in lines[0]
    assert re.search(r"model tiny\d+: 1 worker on cpu with 1 thread, float32$", lines[-4])
    assert "KV cache: 600 blocks of 16 tokens" in lines[-3]
    assert lines[-2].startswith(f"longshore: ready at {deployment.url} (model ")
    assert lines[-1] == f"longshore: dashboard: {deployment.url}/dashboard"
    assert f"longshore: chat: longshore chat --url {deployment.url}\n" in deployment.output
    assert "longshore.deploy" not in start


# What the folder sets


@pytest.fixture(scope="module")
def with_defaults(
    tiny_model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Serve a folder with sampling defaults and end tokens; the blocks depend on the memory."""
    folder = tmp_path_factory.mktemp("folder")
    (end,) = reference(tiny_model, PROMPTS[0])[2:3]
    changes = {
        "do_sample": False,
        "repetition_penalty": PENALTY,
        "max_new_tokens": MAX_NEW_TOKENS,
        "eos_token_id": [end],
    }
    model_dir = copy_of(tiny_model[0], folder / "model", generation_config=changes)
    share = ("--kv-memory-fraction", str(SHARE_OF_MEMORY), "--log-level", "debug")
    with Deployment(model_dir, folder, *share, num_blocks=None) as deployment:
        yield deployment.wait_until_ready()


PROMPTS: Final = [[20 + 7 * i % 200 for i in range(40)], [40 + 3 * i for i in range(25)]]
MESSAGE: Final = "Which berth holds C417?"


def reference(tiny_model: tuple[Path, Any], prompt_ids: list[int], **settings: Any) -> list[int]:
    """Outputs of transformers, by default with the folder's settings but without an end token."""
    import torch

    settings = {"repetition_penalty": PENALTY, "eos_token_id": None} | settings
    output = tiny_model[1].generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=0,
        **settings,
    )
    ids: list[int] = output[0, len(prompt_ids) :].tolist()
    return ids


def test_a_share_of_the_memory_in_float32(with_defaults: Deployment) -> None:
    check_printed_share_of_memory(with_defaults, "float32")


def test_what_a_request_does_not_say_generation_config_does(
    with_defaults: Deployment, tiny_model: tuple[Path, Any]
) -> None:
    end = reference(tiny_model, PROMPTS[0])[2]
    chat_ids = byte_level_tokenizer().encode(f"{BOS}[user]{MESSAGE}{EOS}[assistant]").ids
    with openai.OpenAI(base_url=f"{with_defaults.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id

        def complete(**settings: Any) -> list[Any]:
            body = {"return_token_ids": True} | settings
            return client.completions.create(model=model, prompt=PROMPTS, extra_body=body).choices

        answers = complete()
        assert [answer.finish_reason for answer in answers] == ["stop", "length"]
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == reference(tiny_model, prompt, eos_token_id=end)
        said = complete(repetition_penalty=1.0, ignore_eos=True)
        for prompt, answer in zip(PROMPTS, said, strict=True):
            assert answer.token_ids == reference(tiny_model, prompt, repetition_penalty=1.0)
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": MESSAGE}]
        )
    wanted = reference(tiny_model, chat_ids, eos_token_id=end)
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(chat_ids), len(wanted))
    assert chat.choices[0].message.content == byte_level_tokenizer().decode(wanted)
