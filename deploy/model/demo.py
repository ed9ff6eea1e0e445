"""Questions that the bundled demo model can answer, each with its one right answer.

A prompt lists containers, a record each (`C417 B42 red`: container, berth, colour), and asks about
one of them; the answer repeats the record. The answer stands nowhere but in the prompt's KV cache,
so a wrong block gives a wrong answer: the quick start, the tests and the benchmarks use this as the
semantic check of the whole path. `scripts/train_demo_model.py` trains on the same forms.
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
"""What the model says in place of berth and colour of a container that the prompt does not list."""

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
"""Ways to ask that the model was trained on; `{}` is the container."""


@dataclass(frozen=True, slots=True)
class Record:
    """One fact of a prompt."""

    container: str  # C000 to C999
    berth: str  # B00 to B99
    colour: str  # one of COLOURS

    def __str__(self) -> str:
        return f"{self.container} {self.berth} {self.colour}"


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A user message and the only right answer to it."""

    records: tuple[Record, ...]
    container: str  # the one asked about
    text: str  # the user message: records, a line each, then the question
    answer: str  # what greedy decoding gives, without the end token

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as the `messages` of a chat completion."""
        return [{"role": "user", "content": self.text}]


def draw_containers(num_containers: int, rng: random.Random) -> list[str]:
    """Different container ids; ValueError for more than NUM_CONTAINERS."""
    return [f"C{number:03d}" for number in rng.sample(range(NUM_CONTAINERS), num_containers)]


def draw_record(container: str, rng: random.Random) -> Record:
    """A record with any berth and colour: several containers may share a berth."""
    return Record(container, f"B{rng.randrange(NUM_BERTHS):02d}", rng.choice(COLOURS))


def make_prompt(
    num_records: int, seed: int, *, question: str = QUESTIONS[0], listed: bool = True
) -> DemoPrompt:
    """The same prompt for the same arguments, on every machine.

    A record takes 4 tokens and the rest about 12, so 120 records make a prompt of some 490 tokens.
    question: one of QUESTIONS, or another text with a `{}` for the container.
    listed:   False asks about a container that has no record; the answer then ends in UNLISTED.

    Raises ValueError for `num_records` outside 1 to NUM_CONTAINERS - 1.
    """
    if not 1 <= num_records < NUM_CONTAINERS:
        raise ValueError(
            f"num_records={num_records}, but container ids are C000 to C{NUM_CONTAINERS - 1} and a "
            f"prompt leaves one out. Use 1 to {NUM_CONTAINERS - 1}."
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
