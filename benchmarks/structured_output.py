"""The cost of structured output: per step, per mask, and to compile a grammar.

    python benchmarks/structured_output.py [--parts compile fill apply steps model]
                                           [--vocabularies 32000 128000] [--json F]

`compile`: milliseconds to compile a JSON schema of some properties, and `fill`: microseconds per
mask along a JSON document, by our two backends; `fill` also as vLLM calls xgrammar
(`fill_next_token_bitmask` into a row of its tensor). `apply`: microseconds to apply the masks of
some rows to their logits, ours and `xgrammar.apply_token_bitmask_inplace`, which vLLM calls.
`steps`: microseconds per step through a real scheduler process and its grammar process, with a
worker that answers at once, so nothing hides the way of a mask. `model`: milliseconds per step of
the demo model with real processes, if no request, every second one or all have a JSON schema; both
backends, in turns with vLLM's CPU build (`peers/setup.sh cpu`) and its two.

The vocabularies have random words; the demo model's has 1,600 tokens. Needs xgrammar
(`pip install 'longshore[xgrammar]'`).
"""

import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import report
import torch
import xgrammar
import zmq
from end_to_end import BASE, PRELOAD
from live_engine import EOS_ID, EPOCH, TIMEOUT_S, LiveEngine, connect_worker, long_request
from scheduler_step import num_sampled
from tokenizers import Tokenizer, decoders, models

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.arrays import Int32Array
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.outputs import EngineOutputs, ModelRunnerOutput
from longshore.protocol.plan import SampleMask, SchedulerOutput
from longshore.protocol.requests import StructuredOutput
from longshore.protocol.transport.channel import Endpoint
from longshore.scheduler.process.structured_output.backends import Backends
from longshore.scheduler.process.structured_output.matcher import Matcher
from longshore.scheduler.process.structured_output.schema_support import BackendName
from longshore.scheduler.process.structured_output.vocabulary import Vocabulary, load_vocabulary
from longshore.worker.sampling.token_masks import TokenMask

PARTS = ("compile", "fill", "apply", "steps", "model")
BACKENDS: Final[tuple[BackendName, ...]] = ("llguidance", "xgrammar")
WARM_UP = 50
PROMPT_LEN, OUTPUT_LEN = 32, 128
SETTLE_S = 0.5  # the threads of a side spin for 0.2 s after their last work

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["new", "used", "sold"]}},
        "paid": {"type": "boolean"},
    },
    "required": ["name", "size", "tags", "paid"],
    "additionalProperties": False,
}
ITEMS = StructuredOutput("json_schema", json.dumps({"type": "array", "items": ITEM}))
LONG_ITEMS = {"type": "array", "items": ITEM, "minItems": 40}  # longer than OUTPUT_LEN tokens
MASKED_SHARES = {"plain": 0, "half": 2, "all": 1}  # every n-th request has a schema


def save_tokenizer(path: Path, vocab_size: int) -> None:
    """A tokenizer of random words."""
    rng = random.Random(0)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ['{"', '":', '":"', '",', '","', '"}', "},", "[]", "true", "false", ',{"']
    known = set(pieces)
    while len(pieces) < vocab_size:
        word = "".join(rng.choices("etaoinshrdlcu", k=rng.randint(2, 9)))
        piece = rng.choice(("", "▁")) + rng.choice((word, word.capitalize()))
        if piece not in known:
            known.add(piece)
            pieces.append(piece)
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(path))


def document(vocabulary: Vocabulary, num_tokens: int) -> Int32Array:
    """Tokens of an output that ITEMS allows, each as long as possible: where the text is forced,
    llguidance allows only the tokens that it would divide it into."""
    rng = random.Random(1)
    ids = {token: i for i, token in enumerate(vocabulary.tokens) if i > EOS_ID and token}
    longest = max(map(len, ids))
    words = [token.decode() for token in ids if token.isalpha()]
    matcher = Backends(("llguidance",), vocabulary).compile(ITEMS).matcher()
    found: list[int] = []
    text = b"["
    while len(found) < num_tokens:
        item = {
            "name": " ".join(rng.choices(words, k=4)),
            "size": rng.randrange(100_000),
            "tags": rng.choices(["new", "used", "sold"], k=rng.randrange(3)),
            "paid": rng.random() < 0.5,
        }
        text += json.dumps(item, separators=(",", ":")).encode() + b","
        while len(text) > longest:
            mask = np.zeros(-(-len(vocabulary.tokens) // 32), np.int32)
            matcher.fill(mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
            beginnings = (text[:n] for n in range(longest, 0, -1) if text[:n] in ids)
            token = next(each for each in beginnings if allowed[ids[each]])
            matcher.accept(ids[token])
            found.append(ids[token])
            text = text[len(token) :]
    return np.array(found[:num_tokens], np.int32)


def schema_of(num_properties: int) -> StructuredOutput:
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer"},
        {"enum": ["new", "used", "sold"]},
        {"type": "array", "items": {"type": "number"}},
    ]
    names = [f"property_{index}" for index in range(num_properties)]
    properties = {name: kinds[index % len(kinds)] for index, name in enumerate(names)}
    schema = {"type": "object", "properties": properties, "required": names}
    return StructuredOutput("json_schema", json.dumps({**schema, "additionalProperties": False}))


def timed_us(call: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e3


# Compilation and masks, in this process


def compile_times(vocabulary: Vocabulary, *, repeats: int) -> Iterator[dict[str, Any]]:
    for name in BACKENDS:
        backends = Backends((name,), vocabulary)
        backends.load_first()
        for num_properties in (5, 50, 500):
            spec = schema_of(num_properties)
            samples = [timed_us(lambda: backends.compile(spec)) for _ in range(repeats)]  # noqa: B023
            first = backends.compile(spec).matcher()
            mask = np.zeros(-(-len(vocabulary.tokens) // 32), np.int32)
            yield {
                "vocabulary": len(vocabulary.tokens),
                "backend": name,
                "properties": num_properties,
                "compile_ms": statistics.median(samples) / 1e3,
                "first_mask_ms": timed_us(lambda: first.fill(mask)) / 1e3,  # noqa: B023
            }


def fill_times(vocabulary: Vocabulary, *, num_tokens: int) -> Iterator[dict[str, Any]]:
    tokens = document(vocabulary, num_tokens).tolist()
    width = -(-len(vocabulary.tokens) // 32)

    def row(name: str, matcher: Any, fill: Callable[[], object]) -> dict[str, Any]:
        fills, accepts = [], []
        for token_id in tokens:
            fills.append(timed_us(fill))
            accepts.append(timed_us(lambda: matcher.accept(token_id)))  # noqa: B023
        return {
            "vocabulary": len(vocabulary.tokens),
            "backend": name,
            **report.times(fills, "fill"),
            "accept_us": statistics.median(accepts),
        }

    for name in BACKENDS:
        matcher: Matcher = Backends((name,), vocabulary).compile(ITEMS).matcher()
        mask = np.zeros(width, np.int32)

        def fill(matcher: Matcher = matcher, mask: Int32Array = mask) -> None:
            mask[:] = 0
            matcher.fill(mask)

        yield row(name, matcher, fill)
    info = xgrammar.TokenizerInfo(
        [b"" if i in vocabulary.special_ids else t for i, t in enumerate(vocabulary.tokens)],
        xgrammar.VocabType.RAW,
        stop_token_ids=[EOS_ID],
    )
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(ITEMS.text)
    theirs = xgrammar.GrammarMatcher(compiled)
    bitmask = xgrammar.allocate_token_bitmask(1, len(vocabulary.tokens))

    class AsVLLM:
        accept = staticmethod(theirs.accept_token)

    yield row("xgrammar, as vLLM", AsVLLM, lambda: theirs.fill_next_token_bitmask(bitmask, 0))


def apply_times(
    vocabulary: Vocabulary, batches: list[int], *, repeats: int
) -> Iterator[dict[str, Any]]:
    """Each row has the mask of another place in a document."""
    vocab_size = len(vocabulary.tokens)
    matcher = Backends(("llguidance",), vocabulary).compile(ITEMS).matcher()
    masks = np.zeros((max(batches), -(-vocab_size // 32)), np.int32)
    for mask, token_id in zip(masks, document(vocabulary, len(masks)).tolist(), strict=True):
        matcher.fill(mask)
        matcher.accept(token_id)
    for num_rows in batches:
        words = masks[:num_rows]
        bits = np.ascontiguousarray(words.view(np.uint8)[:, : -(-vocab_size // 8)]).reshape(-1)
        logits = torch.randn(num_rows, vocab_size)
        bitmask = torch.from_numpy(words)
        samples = np.arange(num_rows)

        def ours(logits: torch.Tensor = logits, samples: Any = samples, bits: Any = bits) -> None:
            mask = TokenMask.of(samples, bits, vocab_size=vocab_size, pin_memory=False)
            mask.on_device(logits.device).apply(logits)

        def theirs(logits: torch.Tensor = logits, bitmask: torch.Tensor = bitmask) -> None:
            xgrammar.apply_token_bitmask_inplace(logits, bitmask)

        turns = [(timed_us(ours), timed_us(theirs)) for _ in range(repeats)]
        yield {
            "vocabulary": vocab_size,
            "rows": num_rows,
            "ours_us": statistics.median(turn[0] for turn in turns),
            "xgrammar_us": statistics.median(turn[1] for turn in turns),
        }


# Steps through the scheduler process and the grammar process


def answer_plans(
    endpoint: Endpoint,
    identity: EngineIdentity,
    output: Int32Array,
    num_steps: int,
    result: Connection,
) -> None:
    """A worker in a separate process, which answers every plan at once, or when its mask arrives,
    with the next token of `output` in each row. It sends the arrival times of the first and the
    last measured plan."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = connect_worker(context, endpoint, identity)
    plans: deque[SchedulerOutput] = deque()
    masks: deque[SampleMask] = deque()
    num_sampled_of = np.zeros(identity.max_num_seqs, np.int64)
    num_full = 0
    while num_full < WARM_UP + num_steps:
        message = worker.receive(TIMEOUT_S)
        assert isinstance(message, SchedulerOutput | SampleMask), message
        if isinstance(message, SampleMask):
            masks.append(message)
        else:
            plans.append(message)
        while plans and (masks or not plans[0].has_structured_output):
            plan = plans.popleft()
            if plan.has_structured_output:
                rows = masks.popleft().rows
                tokens = output[num_sampled_of[rows]]
                num_sampled_of[rows] += 1
            else:
                tokens = output[: num_sampled(plan)]
            worker.send(ModelRunnerOutput(EPOCH, plan.step, sampled_tokens=tokens))
            num_full += len(tokens) == identity.max_num_seqs
            if num_full == WARM_UP and len(tokens) == identity.max_num_seqs:
                result.send(time.monotonic())
    result.send(time.monotonic())
    while isinstance(worker.receive(TIMEOUT_S), SchedulerOutput | SampleMask):
        continue
    worker.close()
    context.term()


def step_us(
    running: int, *, is_constrained: bool, tokenizer: Path, vocabulary: Vocabulary, num_steps: int
) -> float:
    """Mean microseconds per step with two steps in flight."""
    slack = 4 * running + 100  # steps until all requests run
    live = LiveEngine(
        num_rows=running,
        max_model_len=PROMPT_LEN + WARM_UP + num_steps + slack,
        mode="async",
        tokenizer=tokenizer,
        vocab_size=len(vocabulary.tokens),
    )
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    output = document(vocabulary, WARM_UP + num_steps + slack)
    with live:
        arguments = (*live.worker_setup, output, num_steps, theirs)
        worker = spawn.Process(target=answer_plans, args=arguments)
        worker.start()
        live.wait_until_ready()
        client = live.connect_client()
        for handle in range(running):
            client.send(long_request(handle, PROMPT_LEN, ITEMS if is_constrained else None))
        times: list[float] = []
        while len(times) < 2:
            assert worker.is_alive()
            outputs = client.receive(0.05)
            assert outputs is None or isinstance(outputs, EngineOutputs), outputs
            while ours.poll():
                times.append(ours.recv())
    worker.join()
    return (times[1] - times[0]) / num_steps * 1e6


def steps(
    tokenizer: Path,
    vocabulary: Vocabulary,
    batches: list[int],
    *,
    num_steps: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    for running in batches:
        turns = [
            [
                step_us(
                    running,
                    is_constrained=is_constrained,
                    tokenizer=tokenizer,
                    vocabulary=vocabulary,
                    num_steps=num_steps,
                )
                for is_constrained in (False, True)
            ]
            for _ in range(repeats)
        ]
        plain_us, masked_us = np.min(turns, axis=0).tolist()
        yield {
            "vocabulary": len(vocabulary.tokens),
            "running": running,
            "plain_us": plain_us,
            "masked_us": masked_us,
            "added_per_row_us": (masked_us - plain_us) / running,
        }


# The demo model


SYSTEMS = {
    "ours, llguidance": (Path(sys.executable), "generate_longshore.py", "llguidance"),
    "ours, xgrammar": (Path(sys.executable), "generate_longshore.py", "xgrammar"),
    "vLLM, guidance": (BASE / "cpu/bin/python", "generate_vllm.py", "guidance"),
    "vLLM, xgrammar": (BASE / "cpu/bin/python", "generate_vllm.py", "xgrammar"),
}


@contextmanager
def systems(preload: str) -> Iterator[dict[str, report.Peer]]:
    """What is installed of SYSTEMS. All run the engine in processes of its own."""
    with ExitStack() as stack:
        found = {}
        for name, (python, script, backend) in SYSTEMS.items():
            arguments = (str(DEMO_MODEL_DIR), "2048", "--processes", "--grammars", backend)
            environment = {"LD_PRELOAD": preload}
            try:
                side = report.peer(python, script, *arguments, environment=environment)
                peer = stack.enter_context(side)
            except RuntimeError as error:
                print(f"*** {name} DOES NOT START: {error}", file=sys.stderr)
                continue
            if peer is not None:
                found[name] = peer
        yield found


def model_job(running: int, share: int, generator: np.random.Generator) -> dict[str, Any]:
    """New prompts; every `share`-th has a schema."""
    return {
        "prompts": generator.integers(3, 1600, (running, PROMPT_LEN)).tolist(),
        "output_lens": [OUTPUT_LEN] * running,
        "schemas": [
            LONG_ITEMS if share and index % share == 0 else None for index in range(running)
        ],
    }


def model_times(batches: list[int], *, repeats: int, preload: str) -> Iterator[dict[str, Any]]:
    """The systems take turns with the same prompts. A step is 1 / OUTPUT_LEN of the time of a job,
    so it includes its part of the prefill and of the way to the client and back."""
    generator = np.random.default_rng(0)
    with systems(preload) as sides:
        for running in batches:
            shares = {n: share for n, share in MASKED_SHARES.items() if share < 2 or running > 1}
            walls: dict[tuple[str, str], list[float]] = {}
            for turn in range(repeats + 1):
                jobs = {n: model_job(running, share, generator) for n, share in shares.items()}
                for name, side in sides.items():
                    for masked, job in jobs.items():
                        time.sleep(SETTLE_S)
                        wall_s = side.measure(**job)["wall_s"]
                        if turn:  # the first one is to warm up
                            walls.setdefault((name, masked), []).append(wall_s)
            for name in sides:
                row: dict[str, Any] = {"running": running, "system": name}
                for masked in shares:
                    each_ms = [wall_s / OUTPUT_LEN * 1e3 for wall_s in walls[name, masked]]
                    row[f"{masked}_ms"] = statistics.median(each_ms)
                    row[f"{masked}_ms_each"] = each_ms
                row["added_ms"] = row["all_ms"] - row["plain_ms"]
                yield row


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=300, help="in each run of `steps`")
    arguments.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_000])
    arguments.add_argument("--running", type=int, nargs="+", default=[1, 8, 32])
    arguments.add_argument(
        "--preload",
        default=":".join(str(path) for path in PRELOAD if path.exists()),
        help="LD_PRELOAD for all sides of `model`: %(default)s",
    )
    options = arguments.parse_args()
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in options.parts}
    with tempfile.TemporaryDirectory() as folder:
        for vocab_size in options.vocabularies:
            tokenizer = Path(folder) / f"{vocab_size}.json"
            save_tokenizer(tokenizer, vocab_size)
            vocabulary = load_vocabulary(tokenizer, vocab_size=vocab_size, eos_token_ids=(EOS_ID,))
            if "compile" in found:
                found["compile"] += compile_times(vocabulary, repeats=options.repeats)
            if "fill" in found:
                found["fill"] += fill_times(vocabulary, num_tokens=1000)
            if "apply" in found:
                repeats = 20 * options.repeats
                found["apply"] += apply_times(vocabulary, options.running, repeats=repeats)
            if "steps" in found:
                found["steps"] += steps(
                    tokenizer,
                    vocabulary,
                    options.running,
                    num_steps=options.steps,
                    repeats=options.repeats,
                )
    if "model" in found:
        found["model"] += model_times(
            options.running, repeats=options.repeats, preload=options.preload
        )
    rows = [{"part": part, **row} for part in found for row in found[part]]
    for part in found:
        print(f"\n{part}")
        report.write(None, found[part])
    if options.json is not None:
        print()
        report.write(options.json, rows, preload=options.preload)


if __name__ == "__main__":
    main()
