"""Output tokens per second with drafts and without, on a CPU, for answers that repeat the prompt
and for those that do not.

    python benchmarks/speculation.py FILE.gguf [--requests 1 4 16] [--workloads repeat edit story]
                                     [--systems none ngram suffix llamacpp ...] [--rounds 3]
                                     [--json F]

Workloads: `repeat` asks for a module of Python's library again, `edit` for the same with other
names, `story` for something new; requests at the same time have different modules. Systems: `none`,
`ngram` (5 drafts, 2 to 5 tokens compared) and `suffix` (8 drafts, no outputs of other requests),
and, for one request, llama.cpp without drafts (`llamacpp`) and with the same lookup as `ngram`
(`llamacpp-ngram`). Greedy, 128 tokens, end ids ignored, bf16, two threads, own processes. Prompts
are cached by Longshore and not by llama.cpp, so the time of a run with one token is subtracted on
all sides. All systems are loaded before timing starts and take turns. `ratio`: to `none`, or to
`llamacpp`, round by round; `per_step`: tokens per step of a request; `accepted`: the share of the
drafts.
"""

import inspect
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import report
from tokenizers import Tokenizer

from longshore import LLM, SamplingParams
from longshore.deploy.model.folder import read_model_folder

BASE = Path(os.environ.get("PEER_DIR") or Path.home() / ".cache" / "longshore-peers")
MODULES = (
    "bisect", "heapq", "colorsys", "contextlib", "copy", "fnmatch", "functools", "glob", "keyword",
    "queue", "sched", "shlex", "stat", "textwrap", "tempfile", "weakref",
)  # fmt: skip
MODULE_CHARACTERS = 3000
ASKED = {
    "repeat": "Repeat this file exactly:\n{}",
    "edit": "Give all functions of this file other names and print the whole file again:\n{}",
    "story": "Write a long story about a fox and the number {}.",
}
NUM_TOKENS = 128
SETTLE_S = 0.6  # threads of the former turn have ended, and statistics have been sent
LOOKUP = {"num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
OURS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", **LOOKUP},
    "suffix": {
        "method": "suffix",
        "num_speculative_tokens": 8,
        "suffix_decoding_max_cached_requests": 0,
    },
}
PEERS = {"llamacpp": (), "llamacpp-ngram": ("--lookup",)}
COUNTED = ("drafted_rows", "draft_tokens", "accepted_draft_tokens")


class Engine:
    """Longshore with one way to draft."""

    def __init__(self, model: Path, drafts: dict[str, Any] | None) -> None:
        settings = {} if drafts is None else {"speculative_config": drafts}
        self.llm = LLM(
            model, dtype="bfloat16", max_model_len=2048, num_blocks=4096, threads=2, **settings
        )

    def seconds(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        started = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - started

    def counts(self) -> dict[str, float]:
        """COUNTED so far."""
        values = {each.name: getattr(each, "value", 0.0) for each in self.llm.get_metrics()}
        return {name: values[f"longshore_scheduler_{name}"] for name in COUNTED}


class LlamaCpp:
    def __init__(self, peer: report.Peer) -> None:
        self._peer = peer

    def seconds(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        job = {"prompts": prompts, "output_lens": [num_tokens] * len(prompts)}
        return float(self._peer.measure(**job)["wall_s"])

    def counts(self) -> dict[str, float]:
        return dict.fromkeys(COUNTED, 0.0)


@contextmanager
def systems(model: Path, names: Sequence[str]) -> Iterator[dict[str, Engine | LlamaCpp]]:
    with ExitStack() as stack:
        made: dict[str, Engine | LlamaCpp] = {}
        for name in names:
            if name in OURS:
                engine = made[name] = Engine(model, OURS[name])
                stack.enter_context(engine.llm)
                continue
            python, arguments = BASE / "llamacpp/bin/python", (str(model), "2048", *PEERS[name])
            peer = stack.enter_context(report.peer(python, "generate_llamacpp.py", *arguments))
            if peer is not None:
                made[name] = LlamaCpp(peer)
        yield made


def prompts_of(workload: str, tokenizer: Tokenizer, count: int, turn: int) -> list[list[int]]:
    """Prompts that no earlier turn had."""
    prompts = []
    for index in range(count):
        number = turn * count + index
        about = str(number)
        if workload != "story":
            module = import_module(MODULES[number % len(MODULES)])
            about = inspect.getsource(module)[:MODULE_CHARACTERS]
            if number >= len(MODULES):
                about = f"# {number}\n{about}"
        text = ASKED[workload].format(about)
        chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(tokenizer.encode(chat, add_special_tokens=False).ids)
    return prompts


def measure(
    workload: str,
    count: int,
    sides: dict[str, Engine | LlamaCpp],
    tokenizer: Tokenizer,
    rounds: int,
) -> list[dict[str, Any]]:
    rates: dict[str, list[float]] = {name: [] for name in sides}
    drafts: dict[str, dict[str, float]] = {name: dict.fromkeys(COUNTED, 0.0) for name in sides}
    for turn in range(rounds + 1):
        prompts = prompts_of(workload, tokenizer, count, turn)
        for name, side in sides.items():
            if count > 1 and name in PEERS:
                continue
            if name in OURS:
                side.seconds(prompts, 1)  # from then on they are prefix hits
            time.sleep(SETTLE_S)
            prompt_s = side.seconds(prompts, 1)
            before = side.counts()
            decode_s = side.seconds(prompts, NUM_TOKENS) - prompt_s
            if name in OURS:
                time.sleep(SETTLE_S)
                side.seconds(prompts[:1], 1)  # an idle engine sends no statistics
                time.sleep(SETTLE_S)
            after = side.counts()
            print(workload, count, turn, name, f"{decode_s:.2f} s", file=sys.stderr, flush=True)
            if turn:
                rates[name].append(count * (NUM_TOKENS - 1) / decode_s)
                for each in COUNTED:
                    drafts[name][each] += after[each] - before[each]
    rows = []
    for name, values in rates.items():
        if not values:
            continue
        base = rates["llamacpp" if name in PEERS else "none"]
        accepted, drafted = drafts[name]["accepted_draft_tokens"], drafts[name]["draft_tokens"]
        num_outputs = rounds * count * (NUM_TOKENS - 1)
        rows.append(
            {
                "workload": workload,
                "requests": count,
                "system": name,
                "output_tokens_per_s": float(np.median(values)),
                "ratio": float(np.median(np.array(values) / np.array(base))),
                "per_step": num_outputs / (num_outputs - accepted),
                "accepted": accepted / drafted if drafted else 0.0,
            }
        )
    return rows


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument(
        "model", type=Path, metavar="FILE", help="GGUF file or folder of the model"
    )
    arguments.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    arguments.add_argument("--workloads", nargs="+", choices=ASKED, default=list(ASKED))
    arguments.add_argument("--systems", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    state_dir = Path.home() / ".local/state/longshore"
    tokenizer_file = read_model_folder(options.model, state_dir).tokenizer_file
    assert tokenizer_file is not None
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    with systems(options.model, options.systems) as sides:
        rows = [
            row
            for workload in options.workloads
            for count in options.requests
            for row in measure(workload, count, sides, tokenizer, options.rounds)
        ]
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
