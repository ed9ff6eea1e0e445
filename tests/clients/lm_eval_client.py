"""lm-eval, an evaluation client, with tasks whose only correct answers the demo model gives."""

import json
from pathlib import Path
from typing import Any

import lm_eval
from features import MODEL, MODEL_DIR, URL, feature, use_all

RECORDS = ("C417 B42 red", "C009 B07 blue")
QUESTIONS = [
    {
        "question": "\n".join([*RECORDS, f"Where is {record.split()[0]}?"]),
        "choices": [record, f"{record.split()[0]} B00 grey"],
    }
    for record in RECORDS
]
Path("questions.jsonl").write_text("\n".join(json.dumps(line) for line in QUESTIONS))


def evaluate(kind: str, path: str, task: dict[str, Any], **settings: Any) -> dict[str, Any]:
    questions = {"test": str(Path("questions.jsonl").absolute())}
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": questions}}
    evaluated = lm_eval.simple_evaluate(
        model=kind,
        model_args={
            "model": MODEL,
            "base_url": URL + path,
            "num_concurrent": 2,
            "max_retries": 1,
            **settings,
        },
        tasks=[{**data, "test_split": "test", "doc_to_text": "{{question}}", **task}],
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    assert evaluated is not None
    results: dict[str, Any] = evaluated["results"][task["task"]]
    return results


def mean_of(metric: str) -> list[dict[str, Any]]:
    return [{"metric": metric, "aggregation": "mean", "higher_is_better": True}]


@feature
def log_likelihoods() -> None:
    task = {
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": mean_of("acc"),
    }
    kind, path = "local-completions", "/v1/completions"
    assert evaluate(kind, path, task, tokenizer=str(MODEL_DIR))["acc,none"] == 1


@feature
def chat() -> None:
    task = {
        "task": "generation",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8},
        "metric_list": mean_of("exact_match"),
    }
    kind, path = "local-chat-completions", "/v1/chat/completions"
    assert evaluate(kind, path, task)["exact_match,none"] == 1


use_all("lm-eval")
