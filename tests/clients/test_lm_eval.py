"""lm-eval, an evaluation client, with a task whose only correct answers the demo model gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR, make_prompt
from tests.clients.conftest import RunClient
from tests.integration.deployment import Deployment

NUM_QUESTIONS = 4
OF_TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with the tasks `choice` and `generation`."""
    lines = []
    for seed in range(NUM_QUESTIONS):
        prompt = make_prompt(10, seed)
        container, *_ = prompt.answer.split()
        choices = [prompt.answer, f"{container} B00 red", f"{container} B00 blue"]
        lines.append(json.dumps({"question": prompt.text, "choices": choices}))
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    for name, parts in OF_TASKS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **parts,
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return tmp_path


def evaluate(
    run_client: RunClient, tasks: Path, task: str, kind: str, settings: dict[str, Any], *flags: str
) -> dict[str, Any]:
    run_client(
        "lm_eval",
        "lm_eval",
        "run",
        "--model",
        kind,
        "--model_args",
        ",".join(f"{name}={value}" for name, value in settings.items()),
        "--include_path",
        tasks,
        "--tasks",
        task,
        "--output_path",
        tasks / "results.json",
        *flags,
    )
    (report,) = tasks.rglob("results*.json")
    results: dict[str, Any] = json.loads(report.read_text())["results"][task]
    return results


def test_log_likelihoods_of_choices(server: Deployment, run_client: RunClient, tasks: Path) -> None:
    settings = {
        "model": DEMO_MODEL_DIR.name,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": DEMO_MODEL_DIR,
        "num_concurrent": 2,
        "max_retries": 1,
    }
    flags = ["--apply_chat_template", "--batch_size", "4"]
    results = evaluate(run_client, tasks, "choice", "local-completions", settings, *flags)
    assert results["acc,none"] == 1


def test_generations_of_chats(server: Deployment, run_client: RunClient, tasks: Path) -> None:
    settings = {
        "model": DEMO_MODEL_DIR.name,
        "base_url": f"{server.url}/v1/chat/completions",
        "num_concurrent": 2,
        "max_retries": 1,
    }
    kind = "local-chat-completions"
    results = evaluate(run_client, tasks, "generation", kind, settings, "--apply_chat_template")
    assert results["exact_match,none"] == 1
