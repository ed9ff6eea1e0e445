"""Time to the first token in each turn of chats, of a hybrid model and one with full attention.

    python benchmarks/hybrid_turns.py [--turns 6] [--chats 5] [--size small] [--json F]

Both models have random weights in bfloat16, as many layers and within 1 % as many parameters; one
has the layers of Qwen3.5 (gated DeltaNet, and full attention in one layer of four), the other those
of Qwen3. Each is served by `longshore serve` with one thread. The chats go through
`/v1/chat/completions`; in a turn, the user writes 400 tokens, and the model answers with 64
letters. One request runs at a time, and the deployments take turns, chat by chat. The first chat is
not measured.

A row is a turn: medians in milliseconds, the ratio (the median of the chats' ratios), and the
prompt tokens that were found in the cache. The hybrid model has no state after its own answers, so
it computes the last answer again.
"""

import argparse
import itertools
import json
import string
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import report

sys.path.insert(0, str(report.ROOT))  # for helpers of the tests

from tests.deploy.tiny_tokenizer import VOCAB_SIZE, byte_level_tokenizer, save_tokenizer
from tests.integration.deployment import Deployment
from tests.models import make_tiny_config

MAX_MODEL_LEN: Final = 8192
SYSTEM_TOKENS: Final = 400
QUESTION_TOKENS: Final = 400
ANSWER_TOKENS: Final = 64


class Size(NamedTuple):
    """intermediate_sizes: they make up for attention, which has fewer parameters than DeltaNet."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_sizes: dict[str, int]


SIZES: Final = {
    "tiny": Size(64, 4, 4, {"Qwen3_5": 128, "Qwen3": 170}),
    "small": Size(1024, 12, 8, {"Qwen3_5": 3072, "Qwen3": 3804}),
}


def make_model(family: str, folder: Path, size: Size) -> None:
    """A config.json and a tokenizer of bytes."""
    width = size.hidden_size // size.num_heads
    own: dict[str, Any] = {}
    if family == "Qwen3_5":
        own = {
            "linear_num_key_heads": size.num_heads,
            "linear_num_value_heads": size.num_heads,
            "linear_key_head_dim": width,
            "linear_value_head_dim": width,
        }
    make_tiny_config(
        family,
        folder,
        vocab_size=VOCAB_SIZE,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_sizes[family],
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=2,
        head_dim=width,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        **own,
    )
    save_tokenizer(folder)


class Chat:
    """A chat with a deployment; `ask` returns the milliseconds to the first token, and the number
    of cached prompt tokens."""

    LETTERS: Final = {
        str(byte_level_tokenizer().token_to_id(letter)): 100 for letter in string.ascii_lowercase
    }

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = np.random.default_rng(seed)
        self._messages = [{"role": "system", "content": self._text(SYSTEM_TOKENS)}]

    def _text(self, num_tokens: int) -> str:
        return "".join(self._random.choice(list(string.ascii_uppercase), num_tokens))

    def ask(self) -> tuple[float, int]:
        self._messages.append({"role": "user", "content": self._text(QUESTION_TOKENS)})
        body = {
            "messages": self._messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": self.LETTERS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        usage: dict[str, Any] = {}
        begin_s, first_s, text = time.perf_counter(), 0.0, ""
        with urllib.request.urlopen(request) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
                if piece:
                    first_s = first_s or time.perf_counter()
                    text += piece
        self._messages.append({"role": "assistant", "content": text})
        num_cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return (first_s - begin_s) * 1e3, num_cached


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    families = ("Qwen3_5", "Qwen3")
    size = SIZES[options.size]
    times: dict[str, list[list[float]]] = {family: [] for family in families}
    cached: dict[str, list[int]] = {}
    with ExitStack() as stack:
        deployments = {}
        for family in families:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "model").mkdir()
            make_model(family, folder / "model", size)
            flags = ("--load-format", "dummy", "--dtype", "bfloat16")
            deployment = Deployment(folder / "model", folder, *flags, num_blocks=options.blocks)
            deployments[family] = stack.enter_context(deployment).wait_until_ready()
        for number, family in itertools.product(range(options.chats + 1), families):
            chat = Chat(deployments[family].url, number)
            turns = [chat.ask() for _ in range(options.turns)]
            if number:
                times[family].append([ms for ms, _ in turns])
                cached[family] = [found for _, found in turns]
        for deployment in deployments.values():
            assert deployment.stop() == 0, deployment.output
    hybrid, full = (np.array(times[family]) for family in families)
    return [
        {
            "turn": turn + 1,
            "hybrid_ms": float(np.median(hybrid[:, turn])),
            "full_ms": float(np.median(full[:, turn])),
            "ratio": float(np.median(hybrid[:, turn] / full[:, turn])),
            "hybrid_cached": cached["Qwen3_5"][turn],
            "full_cached": cached["Qwen3"][turn],
        }
        for turn in range(options.turns)
    ]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--turns", type=int, default=6, help="of a chat: %(default)s")
    parser.add_argument("--chats", type=int, default=5, help="of each model: %(default)s")
    parser.add_argument("--size", choices=SIZES, default="small", help="default: %(default)s")
    parser.add_argument("--blocks", type=int, default=4000, help="KV blocks: %(default)s")
    options = parser.parse_args()
    report.write(options.json, measure(options))


if __name__ == "__main__":
    main()
