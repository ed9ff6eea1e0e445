"""guidellm, a benchmark client, with its defaults."""

import json
import subprocess
import sys
from pathlib import Path

from features import MODEL_DIR, URL, feature, use_all


def benchmark(path: str) -> None:
    """Every request succeeds, and has as many tokens as were asked for."""
    report = Path("report.json").absolute()
    subprocess.run(
        [
            Path(sys.executable).with_name("guidellm"),
            "run",
            "--backend",
            f"kind=openai_http,target={URL},request_format={path}",
            "--profile",
            "kind=concurrent,streams=2",
            "--constraint",
            "kind=max_requests,count=4",
            "--tokenizer",
            f"kind=hf_auto,model={MODEL_DIR}",
            "--data",
            "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
            "--output",
            f"kind=json,path={report}",
            "--disable-console",
        ],
        check=True,
    )
    (measured,) = json.loads(report.read_text())["benchmarks"]
    requests = measured["requests"]
    assert requests["errored"] == []
    assert len(requests["successful"]) == 4
    assert {request["output_tokens"] for request in requests["successful"]} == {8}


@feature
def chat_streamed() -> None:
    benchmark("/v1/chat/completions")


@feature
def completions_streamed() -> None:
    benchmark("/v1/completions")


use_all("guidellm")
