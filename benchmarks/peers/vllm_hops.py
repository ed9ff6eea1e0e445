"""The events of `benchmarks/hops.py` in vLLM's scheduler. It reads jobs (`{}`) and writes the files, functions
and calls of each event, one line of JSON each. Runs in vLLM's own environment."""

import os
import sys

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"

import json
import tempfile
from importlib.metadata import version
from pathlib import Path

from bench_vllm_core import BS, LLAMA_2L, hasher_for, make_scheduler
from hop_counter import calls_during, count


def run(model_dir):
    import vllm
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    root = str(Path(vllm.__file__).parent) + "/"
    events, hasher = {}, hasher_for("sha256")

    def note(name, event):
        results = []
        calls = calls_during(lambda: results.append(event()), lambda file: file.startswith(root))
        events[name] = count(calls)
        return results[0]

    def add(sched, name, prompt, max_tokens=64):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return lambda: sched.add_request(
            Request(request_id=name, prompt_token_ids=list(prompt), sampling_params=sampling,
                    pooling_params=None, block_hasher=hasher))

    def apply(sched, plan):
        ids = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids])
        return lambda: sched.update_from_output(plan, output)

    def scheduler(num_blocks=1024):
        return make_scheduler(model_dir, num_blocks, 8)[0]

    def steps(sched, num):
        for _ in range(num):
            apply(sched, sched.schedule())()

    sched = scheduler()
    note("arrive", add(sched, "a", range(10, 50)))
    apply(sched, note("admit", sched.schedule))()
    add(sched, "b", range(10, 50))()
    note("token", apply(sched, note("prefix hit", sched.schedule)))
    steps(sched, 3)
    apply(sched, note("steady", sched.schedule))()

    sched = scheduler()
    add(sched, "a", range(10, 40))()
    add(sched, "b", range(10, 40), max_tokens=4)()
    steps(sched, 2)
    apply(sched, note("full", sched.schedule))()
    note("last token", apply(sched, sched.schedule()))

    sched = scheduler(num_blocks=66)
    add(sched, "a", range(10, 10 + 32 * BS - 1))()
    add(sched, "b", range(5000, 5000 + 33 * BS - 1))()
    while True:
        plan = note("preemption", sched.schedule)
        if plan.preempted_req_ids:
            return events
        apply(sched, plan)()


with tempfile.TemporaryDirectory() as folder:
    Path(folder, "config.json").write_text(json.dumps(LLAMA_2L))
    print(json.dumps({"vllm": version("vllm")}), file=ANSWERS)
    for line in sys.stdin:
        print(json.dumps(run(folder)), file=ANSWERS)
