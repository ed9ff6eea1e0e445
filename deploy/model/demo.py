"""Prompts that the bundled demo model can answer, each with its only correct answer.

A prompt lists containers, one record each (`C417 B42 red`: container, berth, colour), and asks
about one of them; the answer repeats the record. The answer is only in the prompt's KV cache, so a
wrong block gives a wrong answer: the quick start, the tests and the benchmarks use this to check
the whole path. `scripts/train_demo_model.py` trains on the same forms.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEMO_MODEL_DIR: Final = Path(__file__).resolve().parents[1] / "demo_model"

NUM_CONTAINERS: Final = 1000
NUM_BERTHS: Final = 100
COLOURS: Final = (
    "red", "orange", "yellow", "green", "blue", "purple",
    "pink", "brown", "black", "white", "grey", "silver",
)  # fmt: skip

UNLISTED: Final = "unknown"
"""The model's answer instead of berth and colour, for a container that the prompt does not list."""

QUESTIONS: Final = (
    "Where is {}?",
    "Where is {} now?",
    "Where is container {}?",
    "Where is the container {}?",
    "Where can I find {}?",
    "Do you know where {} is?",
    "What berth and colour is container {}?",
    "What berth is {} at?",
    "What berth is container {} in?",
    "What is the berth of {}?",
    "What colour is {}?",
    "What is the colour of container {}?",
    "What color is {}?",
    "What do you know about {}?",
    "Which berth holds {}?",
    "Berth and colour of {}, please.",
    "Tell me about {}.",
    "Tell me where {} is.",
    "Please find {}.",
    "Please tell me the berth of container {}.",
    "Can you find container {} for me?",
    "Look up {}.",
    "Show me {}.",
    "Find {}.",
    "And {}?",
    "Container {}?",
    "{}?",
    "{}",
)
"""Forms of a question that the model was trained on; `{}` is the container."""


@dataclass(frozen=True, slots=True)
class ContainerRecord:
    """One record of a prompt."""

    container: str  # C000 to C999
    berth: str  # B00 to B99
    colour: str  # one of COLOURS

    def __str__(self) -> str:
        return f"{self.container} {self.berth} {self.colour}"


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A user message and its only correct answer."""

    records: tuple[ContainerRecord, ...]
    container: str  # the container in the question
    text: str  # the user message: one record per line, then the question
    answer: str  # the result of greedy decoding, without the end token

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as the `messages` of a chat completion."""
        return [{"role": "user", "content": self.text}]


def draw_containers(num_containers: int, rng: random.Random) -> list[str]:
    """Different container ids; ValueError for more than NUM_CONTAINERS."""
    return [f"C{number:03d}" for number in rng.sample(range(NUM_CONTAINERS), num_containers)]


def draw_record(container: str, rng: random.Random) -> ContainerRecord:
    """A record with any berth and colour: several containers may share a berth."""
    return ContainerRecord(container, f"B{rng.randrange(NUM_BERTHS):02d}", rng.choice(COLOURS))


def make_prompt(
    num_records: int, seed: int, *, question: str = QUESTIONS[0], listed: bool = True
) -> DemoPrompt:
    """Return the same prompt for the same arguments, on every machine.

    A record has 4 tokens and the rest about 12, so 120 records make a prompt of about 490 tokens.
    question: one of QUESTIONS, or another text with `{}` for the container.
    listed:   False asks about a container without a record; then the answer ends with UNLISTED.

    Raises ValueError for `num_records` outside 1 to NUM_CONTAINERS - 1.
    """
    if not 1 <= num_records < NUM_CONTAINERS:
        raise ValueError(
            f"num_records={num_records} must be between 1 and {NUM_CONTAINERS - 1}: container ids "
            f"are C000 to C{NUM_CONTAINERS - 1}, and a prompt omits one."
        )
    rng = random.Random(seed)
    *containers, absent = draw_containers(num_records + 1, rng)
    records = tuple(draw_record(container, rng) for container in containers)
    asked = rng.choice(records)
    container = asked.container if listed else absent
    lines = [str(record) for record in records] + [question.format(container)]
    return DemoPrompt(
        records=records,
        container=container,
        text="\n".join(lines),
        answer=str(asked) if listed else f"{absent} {UNLISTED}",
    )
