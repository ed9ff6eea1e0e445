"""`LLM` with and without processes: equal tokens, no process remains, errors say what died."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from longshore import LLM, SamplingParams
from longshore.deploy.bench.latency import run as run_latency
from longshore.deploy.bench.options import LatencyOptions, ThroughputOptions
from longshore.deploy.bench.throughput import run as run_bench
from longshore.protocol.errors import ConfigError, EngineDead
from tests.integration.deployment import wait_until

SETTINGS: dict[str, Any] = {"num_blocks": 600, "max_num_seqs": 32, "threads": 1}
TOKEN_PROMPTS = [{"prompt_token_ids": list(range(20, 20 + n))} for n in (1, 17, 40)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(tiny_model[0], **SETTINGS) as llm:
        yield llm


def test_both_modes_give_the_tokens_of_transformers(llm: LLM, tiny_model: tuple[Path, Any]) -> None:
    import torch

    separate = llm.generate(TOKEN_PROMPTS, GREEDY, use_tqdm=False)
    with LLM(tiny_model[0], in_process=True, **SETTINGS) as in_process:
        together = in_process.generate(TOKEN_PROMPTS, GREEDY, use_tqdm=False)
    for prompt, ours, theirs in zip(TOKEN_PROMPTS, separate, together, strict=True):
        ids = prompt["prompt_token_ids"]
        expected = tiny_model[1].generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert ours.outputs[0].token_ids == expected[0, len(ids) :].tolist()
        assert ours.outputs == theirs.outputs


def test_outputs_stand_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in (9, 1, 5)]
    outputs = llm.generate(["one", {"prompt_token_ids": [5, 6]}, "three"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
    assert len({output.request_id for output in outputs}) == 3
    (again,) = llm.generate("three", params[2], use_tqdm=False)
    assert again.outputs[0].token_ids == outputs[2].outputs[0].token_ids


def test_chats_take_jobs_and_what_is_kept_of_them(llm: LLM) -> None:
    chat = [{"role": "user", "content": " ".join(map(str, range(60)))}]
    ask = partial(llm.chat, chat, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}")
    private = [ask(cache={"no_store": True})[0] for _ in range(2)]
    salted = [
        ask(cache={"cache_salt": "s"}, job_id=["a"], is_last_step=[last])[0]
        for last in (False, True)
    ]
    assert [output.num_cached_tokens for output in (*private, salted[0])] == [0, 0, 0]
    assert (salted[1].num_cached_tokens or 0) > 0
    assert len({tuple(output.outputs[0].token_ids) for output in (*private, *salted)}) == 1
    with pytest.raises(ValueError, match="must have 1 values"):
        ask(job_id=["a", "b"])


def test_a_stop_string_ends_each_answer_where_it_first_appears(
    llm: LLM, tiny_model: tuple[Path, Any]
) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=3, logprobs=0)
    whole = llm.generate("berth", params, use_tqdm=False)[0].outputs[0]
    stop = whole.text[15:18]
    stopping = replace(params, stop=[stop, "never said"])
    with LLM(tiny_model[0], in_process=True, **SETTINGS) as in_process:
        for each in (llm, in_process):
            outputs = each.generate(["berth", "pier"], stopping, use_tqdm=False)
            cut, other = (output.outputs[0] for output in outputs)
            assert cut.text == whole.text[: whole.text.index(stop)]
            assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
            assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
            assert cut.logprobs is not None
            assert len(cut.logprobs) == len(cut.token_ids) < 60
            assert stop not in other.text
    showing = replace(params, stop=stop, include_stop_str_in_output=True)
    (shown,) = llm.generate("berth", showing, use_tqdm=False)
    assert shown.outputs[0].text == cut.text + stop


def test_more_prompts_than_are_sent_at_once_are_all_answered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore.deploy.llm.answer.MAX_LIVE_REQUESTS", 3)
    params = [SamplingParams(max_tokens=1 + n % 5, ignore_eos=True, seed=n) for n in range(20)]
    prompts = [{"prompt_token_ids": [20 + n]} for n in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [
        1 + n % 5 for n in range(20)
    ]


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ({"prompt_token_ids": [1.5]}, GREEDY),
        ([[1, 2.5, 3]], GREEDY),
        ("\ud800", GREEDY),
        ("text", SamplingParams(stop_token_ids=(1 << 20,))),
    ],
    ids=["float", "list", "surrogate", "stop id"],
)
def test_prompt_that_cannot_be_answered_is_a_value_error(
    llm: LLM, prompt: Any, params: SamplingParams
) -> None:
    with pytest.raises(ValueError, match=r"."):
        llm.generate(prompt, params, use_tqdm=False)


def test_token_ids_may_be_an_array(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": np.arange(20, 30)}, {"prompt_token_ids": list(range(20, 30))}]
    from_array, from_list = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert from_array.outputs == from_list.outputs


def test_cached_prefix_is_counted(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(200, 280))}
    cached = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert cached == [0, 64]


def test_prompts_that_do_not_fit_are_rejected_by_number(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\].*5000 tokens.*4096"):
        llm.generate(["x", {"prompt_token_ids": [5] * 5000}], use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompts\[0\]: text is not supported"):
        llm.generate([{"text": [5]}], use_tqdm=False)
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate(["x"], [GREEDY, GREEDY], use_tqdm=False)


@pytest.mark.parametrize("in_process", [False, True])
def test_interrupt_aborts_and_leaves_the_llm_usable(
    tiny_model: tuple[Path, Any], in_process: bool
) -> None:
    with LLM(tiny_model[0], in_process=in_process, **SETTINGS) as llm:
        long = SamplingParams(max_tokens=4000, ignore_eos=True)
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["x"] * 4, long, use_tqdm=False)
        assert len(llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_dying_engine_raises_and_leaves_nothing(tiny_model: tuple[Path, Any]) -> None:
    before = psutil.Process().children()
    llm = LLM(tiny_model[0], **SETTINGS)
    children = [child for child in psutil.Process().children() if child not in before]
    (worker,) = (child for child in children if "longshore.worker" in child.cmdline())
    threading.Timer(0.3, worker.kill).start()
    with pytest.raises(EngineDead, match=r"worker 0 was killed \(SIGKILL\)"):
        llm.generate("x", SamplingParams(max_tokens=4000, ignore_eos=True), use_tqdm=False)
    assert not any(child.is_running() for child in children)
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("x", use_tqdm=False)


def test_closing_ends_what_another_thread_generates(tiny_model: tuple[Path, Any]) -> None:
    llm = LLM(tiny_model[0], threads=1, num_blocks=600, in_process=True)
    ended: list[BaseException] = []

    def generate() -> None:
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        try:
            llm.generate([{"prompt_token_ids": [5] * 40}] * 500, params, use_tqdm=False)
        except EngineDead as error:
            ended.append(error)

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    wait_until(lambda: len(llm._requests) > 0)
    llm.close()
    thread.join(timeout=60)
    assert len(ended) == 1


def test_checkpoint_that_cannot_be_served_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        LLM(tmp_path)


def test_throughput_benchmark_reports_spread_over_repeats(
    tiny_model: tuple[Path, Any], tmp_path: Path
) -> None:
    result_file = tmp_path / "result.json"
    run_bench(
        ThroughputOptions(
            model=tiny_model[0],
            num_prompts=4,
            input_len=40,
            output_len=6,
            shared_prefix=32,
            repeats=2,
            in_process=True,
            json=result_file,
            **SETTINGS,
        )
    )
    result = json.loads(result_file.read_text())
    assert [run["output_tokens"] for run in result["runs"]] == [24, 24]
    assert [run["cached_tokens"] for run in result["runs"]] == [96, 96]
    assert result["output_tokens_per_s"]["min"] <= result["output_tokens_per_s"]["max"]


def test_latency_benchmark_measures_batches(tiny_model: tuple[Path, Any], tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    run_latency(
        LatencyOptions(
            model=tiny_model[0],
            batch_size=2,
            input_len=20,
            output_len=4,
            num_iters=3,
            num_iters_warmup=1,
            json=result_file,
            **SETTINGS,
        )
    )
    result = json.loads(result_file.read_text())
    assert len(result["latencies_s"]) == 3
    assert min(result["latencies_s"]) * 1e3 <= result["latency_ms"]["p50"] + 0.1


PROGRAM = """
import sys
from longshore import LLM, SamplingParams
llm = LLM(sys.argv[1], num_blocks=600, threads=1)
(output,) = llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))
import psutil
print(len(output.outputs[0].token_ids), "torch" in sys.modules, flush=True)
print(*(child.pid for child in psutil.Process().children()), flush=True)
import os, signal, time
if "fork" in sys.argv[2] and os.fork() == 0:
    for descriptor in (1, 2):  # the test reads them to their end
        os.close(descriptor)
    time.sleep(30)
    os._exit(0)
if "kill" in sys.argv[2]:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "end", ["return", *(pytest.param(e, marks=pytest.mark.slow) for e in ("kill", "fork and kill"))]
)
def test_program_that_never_closes_leaves_no_process_and_loads_no_torch(
    tiny_model: tuple[Path, Any], end: str, tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_model[0]), end],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    summary, pids = run.stdout.splitlines()
    assert summary == "3 False"
    assert "1/1" in run.stderr  # the progress bar
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids.split()))
    wait_until(lambda: not list(tmp_path.glob("longshore-*")))
