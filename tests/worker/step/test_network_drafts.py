"""Drafters with weights in a real worker: their drafts are those of transformers, however the KV
before them came about."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import Rewind
from longshore.protocol.sampling import SamplingParams
from longshore.worker.attention import selector
from longshore.worker.config import WorkerConfig
from longshore.worker.drafting.proposals import StepCosts
from longshore.worker.step import step_launcher
from longshore.worker.step.model_runner import ModelRunner
from longshore.worker.worker import Worker
from tests.models import make_tiny_eagle, make_tiny_llama, make_tiny_mtp_model
from tests.worker.models.cases import LATENT
from tests.worker.plans import Entry, Planner
from tests.worker.step.test_decode_graphs import PaddedAttention, RerunMaker

NUM_BLOCKS = 400
NUM_DRAFTS = 3
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
GREEDY = SamplingParams(temperature=0.0)
WRONG = 2

Reference = Callable[[Sequence[int], int], list[int]]


@dataclass(frozen=True)
class Drafted:
    """reference: the drafts after some tokens."""

    path: Path
    config: dict[str, Any]
    reference: Reference


@pytest.fixture(scope="module", params=["draft_model", "mtp", "eagle3", "eagle3, whole"])
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    path = tmp_path_factory.mktemp("model")
    method, _, is_whole = request.param.partition(", ")
    config = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if request.param == "mtp":
        settings = {**LATENT, "n_group": 4, "topk_group": 2, "initializer_range": 0.2}
        model = make_tiny_mtp_model(path, **settings)
        return Drafted(path, config, mtp_reference(model))
    model = make_tiny_llama(path, num_hidden_layers=4)
    if method == "eagle3":
        drafter = tmp_path_factory.mktemp("drafter") / "eagle"
        changes = {"is_whole": True, "norm_before_residual": True} if is_whole else {}
        make_tiny_eagle(drafter, model, read_layers=(1, 0, 3), **changes)
        return Drafted(path, config | {"model": str(drafter)}, eagle_reference(drafter, model))
    small = tmp_path_factory.mktemp("draft-model")
    draft_model = make_tiny_llama(small, seed=1, num_hidden_layers=1)
    return Drafted(path, config | {"model": str(small)}, greedy_reference(draft_model))


def greedy_reference(model: Any) -> Reference:
    @torch.no_grad()
    def drafts(token_ids: Sequence[int], count: int) -> list[int]:
        known = list(token_ids)
        for _ in range(count):
            known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
        return known[len(token_ids) :]

    return drafts


def mtp_reference(model: Any) -> Reference:
    """The first token has a hidden state of zeros before it, as in our layer."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    # transformers knows the layer by its number in the published model.
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\..*"]
    mtp = MtpModel.from_pretrained(model).eval()

    @torch.no_grad()
    def drafts(token_ids: Sequence[int], count: int) -> list[int]:
        known = torch.tensor([list(token_ids)])
        hidden = model.model(known[:, :-1]).last_hidden_state
        previous = torch.cat((torch.zeros_like(hidden[:, :1]), hidden), dim=1)
        for _ in range(count):
            computed = mtp.forward_layer(
                0,
                previous,
                torch.arange(known.shape[1])[None],
                MtpCache(config=model.config.get_mtp_config()),
                input_ids=known,
            )
            draft = mtp._project_to_logits(computed[:, -1:]).argmax(dim=-1)
            known = torch.cat((known, draft), dim=1)
            previous = torch.cat((previous, computed[:, -1:]), dim=1)
        return known[0, len(token_ids) :].tolist()

    return drafts


def eagle_reference(path: Path, target: Any) -> Reference:
    """In plain torch, as the paper and vLLM have it."""
    config = json.loads((path / "config.json").read_text())
    weights = load_file(path / "model.safetensors")
    weights = {name.replace("layers.0", "midlayer"): each for name, each in weights.items()}
    embeddings = weights.get("embed_tokens.weight", target.model.embed_tokens.weight)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    read_layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt()
        return x * scale * weights[f"{name}.weight"]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * 10_000.0 ** -(torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        one, other = x[..., :half], x[..., half:]
        return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)

    def layer(token_ids: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        embedded, normed = embeddings[token_ids], norm("midlayer.hidden_norm", previous)
        x = torch.cat((norm("midlayer.input_layernorm", embedded), normed), dim=-1)
        residual = normed if config.get("norm_before_residual") else previous
        q, k, v = (
            linear(f"midlayer.self_attn.{name}_proj", x).unflatten(-1, (count, -1))
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k, v = (each.transpose(0, 1) for each in (rotated(q), rotated(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = residual + linear("midlayer.self_attn.o_proj", y.transpose(0, 1).flatten(1))
        normed = norm("midlayer.post_attention_layernorm", x)
        gate = F.silu(linear("midlayer.mlp.gate_proj", normed))
        return x + linear("midlayer.mlp.down_proj", gate * linear("midlayer.mlp.up_proj", normed))

    @torch.no_grad()
    def drafts(token_ids: Sequence[int], count: int) -> list[int]:
        known = torch.tensor(list(token_ids))
        states = target(known[None, :-1], output_hidden_states=True).hidden_states
        read = linear("fc", torch.cat([states[layer][0] for layer in read_layers], dim=-1))
        previous = torch.cat((torch.zeros(1, read.shape[1]), read))
        for _ in range(count):
            hidden = layer(known, previous)
            best = linear("lm_head", norm("norm", hidden[-1:])).argmax(dim=-1)
            known = torch.cat((known, best + weights["d2t"][best] if "d2t" in weights else best))
            previous = torch.cat((previous, hidden[-1:]))
        return known[len(token_ids) :].tolist()

    return drafts


OpenRunner = Callable[..., ModelRunner]


@pytest.fixture
def open_runner(drafted: Drafted, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenRunner]:
    # However long a step takes on a busy machine, drafts pay.
    monkeypatch.setattr(StepCosts, "price", lambda *_: 0.0)
    workers = []

    def open_(**settings: Any) -> ModelRunner:
        config = WorkerConfig(
            model=str(drafted.path),
            num_blocks=NUM_BLOCKS,
            max_num_seqs=8,
            max_model_len=MAX_MODEL_LEN,
            show_progress=False,
            block_size=BLOCK_SIZE,
            poison_kv=True,
            speculative_config=json.dumps(drafted.config),
            **settings,
        )
        workers.append(Worker(config))
        return workers[-1].start()

    yield open_
    for worker in workers:
        worker.close()


def planner() -> Planner:
    return Planner(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        num_lookahead=NUM_DRAFTS,
    )


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=length)


def drafts_of(output: ModelRunnerOutput) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row, token_id in zip(output.draft_rows.tolist(), output.draft_tokens.tolist(), strict=True):
        found.setdefault(row, []).append(token_id)
    return found


class Run:
    """Rows that decode with the drafts that their steps made."""

    def __init__(self, runner: ModelRunner, reference: Reference) -> None:
        self.runner, self.reference = runner, reference
        self.plans = planner()
        self.tokens: dict[int, list[int]] = {}  # of each row, with its prompt
        self.drafts: dict[int, list[int]] = {}
        self.num_accepted = 0

    def begin(self, prompts: dict[int, list[int]], chunk: int = MAX_MODEL_LEN) -> None:
        """In chunks of that many tokens."""
        entries = [Entry(row, prompt) for row, prompt in prompts.items()]
        self.tokens |= {row: list(prompt) for row, prompt in prompts.items()}
        for start in range(0, max(map(len, prompts.values())), chunk):
            counts = {
                row: min(chunk, len(prompt) - start)
                for row, prompt in prompts.items()
                if start < len(prompt)
            }
            self.step(counts, added=entries if start == 0 else ())

    def step(self, *args: Any, **changes: Any) -> None:
        output = self.runner.execute(self.plans.plan(*args, **changes))
        for row, ids in self.plans.verified(output).items():
            self.tokens[row] += ids
            self.num_accepted += len(ids) - 1
        made = drafts_of(output)
        for row, ids in made.items():
            assert ids == self.reference(self.tokens[row], len(ids)), row
        for row in self.plans.sampled_rows[output.step].tolist():
            self.drafts[row] = made.get(row, [])

    def decode(self, num_steps: int, chance: random.Random) -> None:
        """Some drafts are wrong, and some rows verify none."""
        for _ in range(num_steps):
            drafts = {}
            for row, made in sorted(self.drafts.items()):
                kept = [WRONG if chance.random() < 0.2 else each for each in made]
                if kept and chance.random() < 0.9:
                    drafts[row] = kept
            self.step(drafts=drafts)


@pytest.mark.parametrize("chunk", [MAX_MODEL_LEN, 7])
def test_drafts_are_those_of_the_reference(
    chunk: int, open_runner: OpenRunner, drafted: Drafted
) -> None:
    run = Run(open_runner(), drafted.reference)
    run.begin({row: prompt_of(3 + 5 * row, row) for row in (0, 2, 3, 6)}, chunk)
    assert all(len(made) == NUM_DRAFTS for made in run.drafts.values())
    run.decode(7, random.Random(0))


@pytest.mark.parametrize("drafted", ["draft_model", "eagle3"], indirect=True)
def test_drafts_after_replayed_steps_are_those_of_the_reference(
    drafted: Drafted, open_runner: OpenRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose graphs pad decodes."""
    maker = RerunMaker()
    monkeypatch.setattr(selector, "NativeAttention", PaddedAttention)
    monkeypatch.setattr(step_launcher, "graph_maker", lambda device: maker)
    runner = open_runner()
    runner.warm_up(8, 4)
    num_captured = len(maker.replayed)
    run = Run(runner, drafted.reference)
    run.begin({row: prompt_of(3 + 5 * row, row) for row in (0, 2, 3)})
    run.decode(6, random.Random(0))
    assert len(maker.replayed) > num_captured
    assert max(maker.replayed[num_captured:]) > 8


def test_drafts_after_a_hit_are_those_of_a_cold_prompt_at_every_length(
    open_runner: OpenRunner, drafted: Drafted
) -> None:
    prompt = prompt_of(2 * BLOCK_SIZE + 3, 7)
    run = Run(open_runner(), drafted.reference)
    run.begin({0: prompt})
    blocks, (cold, first) = run.plans.blocks[0], (run.drafts[0], run.tokens[0][-1])
    for num_cached in range(1, len(prompt)):
        num_whole = num_cached // BLOCK_SIZE
        held, copies = blocks[:num_whole], []
        if num_cached % BLOCK_SIZE:
            own = run.plans.free.pop()
            copies = [(blocks[num_whole], own, num_cached % BLOCK_SIZE)]
            held = [*held, own]
        run.tokens[1] = list(prompt)
        entry = Entry(1, prompt, blocks=held, num_computed_tokens=num_cached)
        run.step(
            {0: 0, 1: len(prompt) - num_cached},
            added=[entry],
            copies=copies,
        )
        assert run.tokens[1][-1] == first
        assert run.drafts[1] == cold
        for _ in range(2):
            run.step({0: 0}, drafts={1: run.drafts[1]} if run.drafts[1] else None)
        run.plans.blocks[1] = run.plans.blocks[1][num_whole:]  # the shared ones are of row 0
        run.step(finished=[1])
        del run.tokens[1], run.drafts[1]


def test_drafts_after_a_rewind_and_a_preemption(open_runner: OpenRunner, drafted: Drafted) -> None:
    run = Run(open_runner(), drafted.reference)
    run.begin({row: prompt_of(5 + 6 * row, row) for row in (0, 1, 2)})
    run.decode(3, random.Random(1))
    known = len(run.tokens[1]) - 2
    run.tokens[1] = run.tokens[1][:known]
    tokens = run.tokens.pop(2)
    del run.drafts[2]
    resumed = Entry(4, tokens[:17], tuple(tokens[17:]))
    run.tokens[4] = tokens
    run.step(
        {1: known - 4, 4: len(tokens)},
        preempted=[2],
        rewound=[Rewind(1, 4, num_known_tokens=known)],
        added=[resumed],
    )
    run.decode(3, random.Random(2))


def test_a_row_that_ends_gets_no_drafts(open_runner: OpenRunner, drafted: Drafted) -> None:
    """As in an engine that only computes prompts, which must not pay for drafts."""
    run = Run(open_runner(), drafted.reference)
    run.begin({0: prompt_of(MAX_MODEL_LEN - 1, 0)})
    assert len(run.tokens[0]) == MAX_MODEL_LEN
    assert run.drafts[0] == []
    run.begin({1: prompt_of(MAX_MODEL_LEN - 2, 0)})
    assert len(run.drafts[1]) == NUM_DRAFTS


def test_drafts_end_with_the_longest_request(open_runner: OpenRunner, drafted: Drafted) -> None:
    """The positions after it have no slots, and nothing is written to the blocks of others."""
    run = Run(open_runner(), drafted.reference)
    run.begin({0: prompt_of(MAX_MODEL_LEN - 5, 0), 1: prompt_of(9, 1)})
    while len(run.tokens[0]) < MAX_MODEL_LEN:
        left = MAX_MODEL_LEN - len(run.tokens[0])
        drafts = {row: made for row, made in run.drafts.items() if made}
        if 0 in drafts:
            drafts[0] = drafts[0][: left - 1]
        run.step(drafts={row: made for row, made in drafts.items() if made})
