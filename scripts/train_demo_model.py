#!/usr/bin/env python
"""Train the bundled demo model: a small Llama that answers questions about a list of containers.

    python scripts/train_demo_model.py --out deploy/demo_model --seconds 1800
    python scripts/train_demo_model.py --out deploy/demo_model --evaluate-only

The task is lookup in the prompt (induction; Olsson et al., 2022, "In-context learning and induction
heads"). Four things make it learnable in minutes on two cores: an answer starts by repeating the
container id, so every further token is one lookup away; every sequence asks many questions, so the
loss is dense; the number of records grows with the accuracy (a curriculum); and two layers start
near the circuit that lookup needs (`seed_lookup`).

Text, initial weights and the order of batches depend only on `--seed`. The learning rate depends on
the clock with `--seconds` and on the step with `--steps`; only the latter reproduces a run exactly.
If other programs use the machine, one thread is faster than two.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from longshore.deploy.model.demo import (
    COLOURS,
    NUM_BERTHS,
    NUM_CONTAINERS,
    QUESTIONS,
    UNLISTED,
    ContainerRecord,
    draw_containers,
    draw_record,
    make_prompt,
)

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES: Final = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
SPECIAL_TOKENS: Final = (PAD, BOS, END, *ROLES.values())
VOCAB_MULTIPLE: Final = 64  # so that tensor-parallel ranks can split the embedding evenly

# Without tools in the chat, a message is its role, its text and an end. The results of tools are
# shown in the user's message, before the question, as records of a list are.
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    '{% if tools %}{# Answers "ID unknown" are calls of lookup(container). #}{% endif %}'
    "{% set open = namespace(text='') %}"
    "{% for message in messages %}"
    "{% set role, text = message['role'], (message['content'] or '') | trim %}"
    "{% if role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('The demo model knows the roles system, user, assistant and tool, not '"
    " + role + '.') }}"
    "{% elif role == 'tool' %}{{ text + '\\n' }}"
    "{% elif not message['tool_calls'] %}"
    "{{ open.text + '<|' + role + '|>' }}{% set open.text = text + '<|end|>' %}"
    "{% endif %}"
    "{% endfor %}"
    "{{ open.text }}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# A container id is a separate piece, without the space before it, so it is always the same token.
# Other words include the space before them (" B42"), so a record has 4 tokens with its newline.
CONTAINER_PATTERN: Final = r"C[0-9]{3}(?![0-9A-Za-z])"
PIECE_PATTERN: Final = (
    rf"{CONTAINER_PATTERN}| ?(?!{CONTAINER_PATTERN})[A-Za-z]+[0-9]*| ?[0-9]+|[^A-Za-z0-9]"
)

GREETINGS: Final = ("Hello!", "Hello,", "Hi,", "Hi there,", "Thank you.", "Thanks!", "OK,", "So,")
HEADINGS: Final = (
    "Containers:",
    "Records:",
    "The containers:",
    "Here are the containers:",
    "Here is the list of containers:",
    "These containers are in the yard:",
    "You answer questions about containers.",
    "You are a helpful assistant.",
    "Answer from this list:",
)
SEPARATORS: Final = ("\n", "; ", ", ")
BARE_WORDS: Final = ("berth", "colour", "color", "container", "list", "all", "yard", "port")

CURRICULUM: Final = (4, 8, 16, 32, 64, 128, 256)  # maximum records in a prompt, per level
PROMOTION_ACCURACY: Final = 0.96  # of answer tokens, running mean, to open the next level
TOKENS_PER_RECORD, TOKENS_PER_TURN = 4, 11
MAX_SEQUENCES_PER_BATCH, MAX_TOKENS_PER_BATCH = 24, 4096
PEAK_LEARNING_RATE: Final = 1e-3
NUM_WARMUP_STEPS: Final = 100
DECAY_FRACTION: Final = 0.35  # last part of the run, in which the learning rate decreases to 1 %
IGNORED: Final = -100  # label of a token that carries no loss
VALUE_GAIN, MATCH_GAIN, LOOK_BACK_GAIN = 0.1, 1.3, 0.8  # strengths of the seeded heads
NUM_LOOK_BACK_PAIRS: Final = 4  # the fastest rope pairs, which distinguish neighbours
REPORT_INTERVAL_S, SAVE_INTERVAL_S = 20.0, 200.0

EVALUATION_LENGTHS: Final = (64, 128, 256, 512, 768, 1024, 1536)  # tokens of a prompt
NUM_EVALUATION_PROMPTS: Final = 200  # per length
FIRST_HELD_OUT_SEED: Final = 1_000_000

Segment = tuple[str, bool]
"""Text of a training sequence, and whether the model has to produce it (carries loss)."""


def build_tokenizer() -> Tokenizer:
    """A vocabulary of the task's words, and of the 256 bytes for all other text.

    `ignore_merges` looks up a whole piece first. Without merges, a piece that is not in the
    vocabulary is encoded as bytes, so decode(encode(text)) equals text for any text.
    """
    templates = [*QUESTIONS, *GREETINGS, *HEADINGS, " ".join(BARE_WORDS)]
    words = {word for template in templates for word in re.findall(r"[A-Za-z]+", template)}
    variants = sorted({form for word in words for form in (word, word.lower(), word.capitalize())})
    vocabulary = [
        *SPECIAL_TOKENS,
        *sorted(ByteLevel.alphabet()),
        *(f"C{number:03d}" for number in range(NUM_CONTAINERS)),
        *(f"Ġ{value}" for value in (*berths(), *COLOURS, UNLISTED)),  # Ġ: the byte-level space
        *(word for word in variants if len(word) > 1),
        *(f"Ġ{word}" for word in variants),
    ]
    reserved = [f"<|reserved_{i}|>" for i in range(-len(vocabulary) % VOCAB_MULTIPLE)]
    ids = {token: token_id for token_id, token in enumerate([*vocabulary, *reserved])}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = PreTokenizers(
        [
            Split(Regex(PIECE_PATTERN), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in (*SPECIAL_TOKENS, *reserved)]
    )
    return tokenizer


def berths() -> Iterator[str]:
    return (f"B{number:02d}" for number in range(NUM_BERTHS))


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Grouped-query attention and tied embeddings, so that serving exercises both."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        # High for this length: the slow half of the dimensions barely rotates within a prompt, and
        # lookup compares ids by those, independently of their positions.
        rope_theta=500_000.0,
        initializer_range=0.02,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
        attn_implementation="sdpa",
    )


@torch.no_grad()
def seed_lookup(model: LlamaForCausalLM) -> None:
    """Start two layers near the circuit that lookup needs; everything stays trainable.

    Lookup has two hops: each token learns the one and two tokens before it, then a later layer
    finds the token that followed the same ids (an induction head). From a random start, learning
    both took longer than the whole curriculum takes from here, so they start roughly in place
    (compare Trockman and Kolter, 2023, "Mimetic initialization of self-attention layers").
    Phrasings, unlisted containers and sharp, long lookups are learned.

    Needs two key-value heads with two query heads each, as `model_config` has.
    """
    width, head_dim = model.config.hidden_size, model.config.head_dim
    looking_back, matching = (layer.self_attn for layer in model.model.layers[:2])
    content = torch.nn.init.orthogonal_(torch.empty(head_dim, width))
    # Subspaces for a token's predecessors, apart from its own embedding and from each other.
    one_back, two_back = (torch.nn.init.orthogonal_(torch.empty(width, width)) for _ in range(2))

    look_back(model, distances=(1, 2))
    looking_back.v_proj.weight[:head_dim] = content
    written = torch.cat([one_back @ content.T, two_back @ content.T], dim=1)
    looking_back.o_proj.weight[:, : 2 * head_dim] = VALUE_GAIN * written

    own, previous, one_before = content, content @ one_back.T, content @ two_back.T
    matching.q_proj.weight.copy_(MATCH_GAIN * torch.cat([own, own, previous, previous]))
    matching.k_proj.weight.copy_(MATCH_GAIN * torch.cat([previous, one_before]))
    values = torch.nn.init.orthogonal_(matching.v_proj.weight).view(2, 1, head_dim, width)
    values = values.expand(2, 2, head_dim, width).reshape(-1, width)
    matching.o_proj.weight.copy_(VALUE_GAIN * values.T)  # predict the attended token


def look_back(model: LlamaForCausalLM, distances: tuple[int, int]) -> None:
    """Let the first two heads of the first layer attend to the tokens at these distances."""
    width, head_dim = model.config.hidden_size, model.config.head_dim
    # A component common to all embeddings can be rotated by the heads independently of content.
    common = torch.randn(width)
    model.model.embed_tokens.weight.add_(0.5 * model.config.initializer_range * common)
    direction = LOOK_BACK_GAIN * common / common.norm()
    theta = model.config.rope_parameters["rope_theta"]
    turns = theta ** (-torch.arange(NUM_LOOK_BACK_PAIRS) * 2 / head_dim)  # radians per token
    queries, keys = (
        projection.weight.view(-1, 2, head_dim // 2, width)[:, :, :NUM_LOOK_BACK_PAIRS]
        for projection in (
            model.model.layers[0].self_attn.q_proj,
            model.model.layers[0].self_attn.k_proj,
        )
    )
    keys[0, 0], keys[0, 1] = direction, 0.0
    for head, distance in enumerate(distances):
        queries[head, 0] = torch.outer((-turns * distance).cos(), direction)
        queries[head, 1] = torch.outer((-turns * distance).sin(), direction)


class TextSampler:
    """Endless training sequences, as segments, from one random generator."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def sequence(self, num_records: int, num_turns: int) -> list[Segment]:
        """A conversation about `num_records` records, or their list and its shuffled copy."""
        *containers, absent = draw_containers(num_records + 1, self.rng)
        records = [draw_record(container, self.rng) for container in containers]
        if self.rng.random() < 0.25:
            return self._completion(records)
        return self._conversation(records, absent, num_turns)

    def _completion(self, records: list[ContainerRecord]) -> list[Segment]:
        """Plain text: the list, then its records again in another order."""
        segments = [(BOS if self.rng.random() < 0.5 else "", False)]
        segments += [(f"{record}\n", False) for record in records]
        for record in self.rng.sample(records, len(records)):
            segments += [(record.container, False), (f" {record.berth} {record.colour}\n", True)]
        return segments

    def _conversation(
        self, records: list[ContainerRecord], absent: str, num_turns: int
    ) -> list[Segment]:
        listing = self._listing(records)
        if self.rng.random() < 0.3:
            segments = [(f"{BOS}{ROLES['system']}{listing}{END}", False)]
            opening = ""
        else:
            segments = [(BOS, False)]
            opening = listing + self.rng.choice(("\n", "\n", "\n\n"))
        for _ in range(num_turns):
            question, answer = self._turn(records, absent)
            text = f"{ROLES['user']}{opening}{question}{END}{ROLES['assistant']}"
            segments += [(text, False), (f"{answer}{END}", True)]
            opening = ""
        return segments

    def _listing(self, records: list[ContainerRecord]) -> str:
        separator = self.rng.choices(SEPARATORS, weights=(8, 1, 1))[0]
        listing = separator.join(map(str, records))
        if self.rng.random() < 0.1:
            listing += "."
        if self.rng.random() < 0.3:
            listing = f"{self.rng.choice((*HEADINGS, self._gibberish()))}\n{listing}"
        return listing

    def _turn(self, records: list[ContainerRecord], absent: str) -> tuple[str, str]:
        """A question and its answer."""
        question = self._vary(self.rng.choice(QUESTIONS))
        if self.rng.random() < 0.15:
            return question.format(absent), f"{absent} {UNLISTED}"
        record = self.rng.choice(records)
        return question.format(record.container), str(record)

    def _vary(self, question: str) -> str:
        """Vary a question as users type it: lower case, no punctuation, a greeting before it."""
        if self.rng.random() < 0.2:
            question = question[0].lower() + question[1:]
        if self.rng.random() < 0.2:
            question = question.rstrip("?.")
        if self.rng.random() < 0.1:
            question = f"{self.rng.choice((*GREETINGS, self._gibberish()))} {question}"
        return question

    def _gibberish(self) -> str:
        """A few words that the tokenizer encodes as bytes."""
        lengths = [self.rng.randint(2, 9) for _ in range(self.rng.randint(1, 4))]
        letters = "abcdefghijklmnopqrstuvwxyzäéß,.'"
        return " ".join("".join(self.rng.choices(letters, k=length)) for length in lengths)


class Curriculum:
    """The prompt sizes in training: the next size is added when the largest one is learned."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.level = 0
        self.accuracy = [0.0] * len(CURRICULUM)  # running mean per level, of answer tokens

    def draw(self) -> int:
        """The level of the next batch: mostly the highest open one, sometimes an earlier one."""
        return self.level if self.rng.random() < 0.6 else self.rng.randint(0, self.level)

    def record(self, level: int, accuracy: float) -> None:
        self.accuracy[level] += 0.1 * (accuracy - self.accuracy[level])
        is_mastered = self.accuracy[self.level] > PROMOTION_ACCURACY
        if is_mastered and self.level + 1 < len(CURRICULUM):
            self.level += 1

    def __str__(self) -> str:
        seen = zip(CURRICULUM, self.accuracy[: self.level + 1], strict=False)
        return "  ".join(f"{num_records}: {accuracy:.3f}" for num_records, accuracy in seen)


def draw_batch(sampler: TextSampler, tokenizer: Tokenizer, level: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both (num_sequences, length) int64; labels outside answers are
    IGNORED."""
    most_records = CURRICULUM[level]
    num_turns = max(4, most_records // 4)
    length = TOKENS_PER_RECORD * most_records + TOKENS_PER_TURN * num_turns
    num_sequences = min(MAX_SEQUENCES_PER_BATCH, MAX_TOKENS_PER_BATCH // length)
    ids = torch.full((num_sequences, length), tokenizer.token_to_id(PAD))
    labels = torch.full((num_sequences, length), IGNORED)
    for row in range(num_sequences):
        num_records = sampler.rng.randint(most_records // 2, most_records)
        segments = sampler.sequence(num_records, num_turns)
        encodings = tokenizer.encode_batch([text for text, _ in segments])
        row_ids = [i for encoding in encodings for i in encoding.ids]
        row_labels = [
            i if is_answer else IGNORED
            for encoding, (_, is_answer) in zip(encodings, segments, strict=True)
            for i in encoding.ids
        ]
        num_tokens = min(length, len(row_ids))
        ids[row, :num_tokens] = torch.tensor(row_ids[:num_tokens])
        labels[row, :num_tokens] = torch.tensor(row_labels[:num_tokens])
    return ids, labels


def answer_logits(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (n, vocab_size), fp32, and targets (n,) of the n labelled tokens only."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    is_answer = labels[:, 1:] != IGNORED
    return model.lm_head(hidden[:, :-1][is_answer]).float(), labels[:, 1:][is_answer]


def learning_rate(step: int, progress: float) -> float:
    """Warm-up, plateau, then a linear decrease. `progress` is the completed fraction of the run."""
    warmup = min(1.0, (step + 1) / NUM_WARMUP_STEPS)
    decay = min(1.0, max(0.01, (1.0 - progress) / DECAY_FRACTION))
    return PEAK_LEARNING_RATE * warmup * decay


def train(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    seed: int,
    progress_at: Callable[[int], float],
    save: Callable[[], None],
) -> None:
    """Train in place, in bf16 matrix products on fp32 weights, until `progress_at(step)` is 1."""
    sampler, curriculum = TextSampler(seed), Curriculum(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    model.train()
    step, started, reported, saved = 0, time.monotonic(), time.monotonic(), time.monotonic()
    while (progress := progress_at(step)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress)
        level = curriculum.draw()
        ids, labels = draw_batch(sampler, tokenizer, level)
        with torch.autocast("cpu", torch.bfloat16):
            logits, targets = answer_logits(model, ids, labels)
        loss = cross_entropy(logits, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curriculum.record(level, (logits.argmax(-1) == targets).float().mean().item())
        step += 1
        now = time.monotonic()
        if now - reported > REPORT_INTERVAL_S:
            reported = now
            print(f"{now - started:6.0f} s  step {step:6d}  loss {loss.item():.4f}  {curriculum}")
        if now - saved > SAVE_INTERVAL_S:
            saved = now
            save()
    print(f"trained {step} steps in {time.monotonic() - started:.0f} s")


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder, with bf16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(model.state_dict())
    stored.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {
        "bos_token_id": model.config.bos_token_id,
        "eos_token_id": model.config.eos_token_id,
        "pad_token_id": model.config.pad_token_id,
        "do_sample": False,
    }
    for name, content in (
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def held_out_prompt(
    tokenizer: Tokenizer, num_tokens: int, seed: int, *, listed: bool
) -> tuple[list[int], list[int]]:
    """Prompt and answer ids of a prompt of `num_tokens` tokens or up to 8 fewer."""
    question = QUESTIONS[seed % len(QUESTIONS)]
    num_records = num_tokens // TOKENS_PER_RECORD
    while True:
        num_records -= 1
        prompt = make_prompt(num_records, seed, question=question, listed=listed)
        text = f"{BOS}{ROLES['user']}{prompt.text}{END}{ROLES['assistant']}"
        prompt_ids = tokenizer.encode(text).ids
        if len(prompt_ids) <= num_tokens:
            return prompt_ids, tokenizer.encode(f"{prompt.answer}{END}").ids


@torch.inference_mode()
def accuracy(
    model: LlamaForCausalLM, tokenizer: Tokenizer, num_tokens: int, *, listed: bool
) -> float:
    """Fraction of held-out prompts whose greedy answer, including its end token, is correct.

    One pass over prompt and answer is enough: greedy decoding gives the answer if and only if each
    of its tokens is the most likely one after the correct tokens before it.
    """
    num_right = 0
    num_prompts = NUM_EVALUATION_PROMPTS
    for seed in range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + num_prompts):
        prompt_ids, answer_ids = held_out_prompt(tokenizer, num_tokens, seed, listed=listed)
        ids = torch.tensor([prompt_ids + answer_ids])
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        predicted = model.lm_head(hidden[0, len(prompt_ids) - 1 : -1]).argmax(-1)
        num_right += predicted.tolist() == answer_ids
    return num_right / num_prompts


def evaluate(folder: Path) -> None:
    """Load the folder as a user would, and print accuracy by prompt length and precision."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    print(f"{'prompt tokens':>14}{'asked about':>14}{'fp32':>8}{'bf16':>8}")
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for num_tokens in EVALUATION_LENGTHS:
        for listed in (True, False):
            rates = [accuracy(model, tokenizer, num_tokens, listed=listed) for model in models]
            asked = "listed" if listed else "unlisted"
            print(f"{num_tokens:>14}{asked:>14}" + "".join(f"{rate:8.1%}" for rate in rates))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the bundled demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long to train")
    parser.add_argument("--steps", type=int, help="how many steps to train, instead of --seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    parser.add_argument("--evaluate-only", action="store_true", help="only measure --out")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if not arguments.evaluate_only:
        torch.manual_seed(arguments.seed)
        tokenizer = build_tokenizer()
        model = LlamaForCausalLM(model_config(tokenizer))
        seed_lookup(model)
        print(
            f"{model.num_parameters() / 1e6:.2f} M parameters, {tokenizer.get_vocab_size()} tokens"
        )
        started = time.monotonic()

        def progress_at(step: int) -> float:
            if arguments.steps is not None:
                return step / arguments.steps
            return (time.monotonic() - started) / arguments.seconds

        def save() -> None:
            save_model(model, tokenizer, arguments.out)

        train(model, tokenizer, arguments.seed, progress_at, save)
        save()
    evaluate(arguments.out)


if __name__ == "__main__":
    main()
