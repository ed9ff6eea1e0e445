"""lm-eval with one task of multiple choice: it scores the model of a server, and the same model in
transformers.

Runs in the environment of lm-eval, with the server's URL and a folder of the model in float32 as
arguments. The last line that it prints is JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import lm_eval
from lm_eval.tasks import TaskManager

URL, FOLDER = sys.argv[1:]
FACTS: Final = (
    ("The capital of Italy is", "Rome", "Madrid", "Oslo"),
    ("The opposite of hot is", "cold", "green", "seven"),
    ("A dog is a kind of", "animal", "number", "metal"),
    ("Water freezes into", "ice", "gold", "sand"),
    ("The largest planet of the solar system is", "Jupiter", "Mars", "Pluto"),
    ("The sun rises in the", "east", "west", "south"),
    ("The author of Romeo and Juliet is William", "Shakespeare", "Newton", "Einstein"),
    ("The chemical symbol of gold is", "Au", "Fe", "Pb"),
    ("Two plus two equals", "four", "nine", "eleven"),
    ("Japan's currency is the", "yen", "euro", "peso"),
    ("The Great Wall is in", "China", "Brazil", "Kenya"),
    ("Whales live in the", "ocean", "desert", "forest"),
)


def scores(kind: str, **settings: Any) -> dict[str, Any]:
    evaluated = lm_eval.simple_evaluate(
        model=kind,
        model_args=settings,
        tasks=[
            {
                "task": "facts",
                "output_type": "multiple_choice",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(Path("facts.jsonl").absolute())}},
                "test_split": "test",
                "doc_to_text": "{{begin}}",
                "doc_to_choice": "{{ends}}",
                "doc_to_target": 0,
                "metric_list": [
                    {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
                ],
            }
        ],
        task_manager=TaskManager(include_defaults=False),  # reading them all takes long
        bootstrap_iters=0,
        log_samples=True,
    )
    assert evaluated is not None
    samples = sorted(evaluated["samples"]["facts"], key=lambda sample: sample["doc_id"])
    return {
        "accuracy": evaluated["results"]["facts"]["acc,none"],
        "log_likelihoods": [
            float(answer[0]) for sample in samples for answer in sample["filtered_resps"]
        ],
    }


with Path("facts.jsonl").open("w") as file:
    for begin, *ends in FACTS:
        file.write(json.dumps({"begin": begin, "ends": ends}) + "\n")
of_server = scores(
    "local-completions",
    model="smollm2",
    base_url=f"{URL}/v1/completions",
    tokenizer=FOLDER,
    num_concurrent=4,
    batch_size=9,
    max_retries=1,
)
of_transformers = scores("hf", pretrained=FOLDER, device="cpu", dtype="float32", batch_size=36)
print(json.dumps({"server": of_server, "transformers": of_transformers}))
