"""vLLM's scheduler under a workload of `workload.py`. It reads jobs and writes their samples, one line of
JSON each. `benchmarks/scheduler_step.py` and `mixed_load.py` start this program in vLLM's environment and
let the two sides take turns.

Job:    {"work": "steady", "running": 64, "mode": "sync" | "async", "steps": 200, "warm_up": 32,
         "groups": 1, "drafts": 0}; with several KV cache groups, all but the first have sliding windows
Answer: microseconds of each step, by part: intake_us (Request(), which hashes its prompt, and
        add_request), plan_us (schedule), apply_us (update_from_output); and the numbers of finished
        and preempted requests. A cpu_share well below 1 means that other processes used the machine,
        so the samples are unreliable. With drafts, apply_us includes update_draft_token_ids.
"""

import os
import sys

# What the imports print must not get between the answers.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"

import gc
import json
import random
import tempfile
import time
from collections import deque

import vllm
import workload
from bench_vllm_core import LLAMA_2L, T, hasher_for, make_scheduler, settle


class Load:
    """A scheduler with a workload. `step` returns the cost of its three parts, in ns."""

    def __init__(self, model_dir, work, *, is_async, groups, drafts):
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
        from vllm.v1.request import Request

        self.request_type, self.output_type = Request, ModelRunnerOutput
        self.drafts_type, self.num_drafts, self.num_steps = DraftTokenIds, drafts, 0
        self.hasher = hasher_for("sha256")
        self.random_token = random.Random(0).randrange
        num_prompt_tokens = sum(len(arrival.prompt) for arrival in work.first)
        self.sched, _ = make_scheduler(
            model_dir,
            groups * work.num_blocks,
            len(work.first),
            max(num_prompt_tokens, 8192),
            is_async,
            groups,
            drafts,
        )
        self.steps_in_flight = 2 if is_async else 1
        self.in_flight = deque()
        self.num_made = self.num_finished = self.num_preempted = 0
        self.arriving = [self.arguments_of(arrival) for arrival in work.first]
        self.waiting_to_come = deque(self.arguments_of(arrival) for arrival in work.later)

    def arguments_of(self, arrival):
        """What the engine has decoded when it makes a Request."""
        from vllm.sampling_params import SamplingParams

        self.num_made += 1
        return dict(
            request_id=f"cmpl-{self.num_made:024x}",
            prompt_token_ids=arrival.prompt.tolist(),
            sampling_params=SamplingParams(
                max_tokens=arrival.max_tokens, ignore_eos=True, temperature=0.0
            ),
            pooling_params=None,
        )

    def step(self):
        sched, arriving = self.sched, self.arriving
        t0 = T()
        for arguments in arriving:
            sched.add_request(self.request_type(block_hasher=self.hasher, **arguments))
        t1 = T()
        plan_ns = 0
        while len(self.in_flight) < self.steps_in_flight:
            t = T()
            plan = sched.schedule()
            plan_ns += T() - t
            self.num_preempted += len(plan.preempted_req_ids or ())
            self.in_flight.append((plan, self.answer(plan)))
        plan, output = self.in_flight.popleft()
        proposed = self.proposed(output)
        t2 = T()
        outputs = sched.update_from_output(plan, output)
        if proposed is not None:
            sched.update_draft_token_ids(proposed)
        t3 = T()
        ended = sum(
            one.finish_reason is not None for many in outputs.values() for one in many.outputs
        )
        self.num_finished += ended
        self.arriving = [self.waiting_to_come.popleft() for _ in range(ended)]
        return t1 - t0, plan_ns, t3 - t2

    def answer(self, plan):
        """A token for every request that has none left to compute; made when the plan is, as a
        worker would."""
        ids = list(plan.num_scheduled_tokens)
        self.num_steps += 1
        drafts = plan.scheduled_spec_decode_tokens
        tokens = []
        for row, i in enumerate(ids):
            if self.sched.requests[i].is_prefill_chunk:
                tokens.append([])
                continue
            verified = drafts.get(i, [])
            num_right = workload.num_right(row, self.num_steps, self.num_drafts)
            tokens.append([*verified[:num_right], self.random_token(3, 32000)])
        return self.output_type(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=tokens,
        )


    def proposed(self, output):
        """Drafts for the next step of every request; None: there are none."""
        if not self.num_drafts:
            return None
        ids = [name for name, tokens in zip(output.req_ids, output.sampled_token_ids) if tokens]
        each = [[self.random_token(3, 32000) for _ in range(self.num_drafts)] for _ in ids]
        return self.drafts_type(ids, each)


def measure(model_dir, *, work, running, mode, steps, warm_up, groups, drafts=0):
    requests = workload.make(work, running, (steps + warm_up) * (1 + drafts))
    load = Load(
        model_dir, requests, is_async=mode == "async", groups=groups, drafts=drafts
    )
    for _ in range(warm_up):
        load.step()
    settle()
    load.num_finished = load.num_preempted = 0
    started, started_cpu = time.perf_counter(), time.thread_time()
    samples = [load.step() for _ in range(steps)]
    cpu_share = (time.thread_time() - started_cpu) / (time.perf_counter() - started)
    gc.unfreeze()
    intake, plan, apply = ([ns / 1e3 for ns in part] for part in zip(*samples))
    return {
        "cpu_share": cpu_share,
        "intake_us": intake,
        "plan_us": plan,
        "apply_us": apply,
        "num_finished": load.num_finished,
        "num_preempted": load.num_preempted,
        "num_running": len(load.sched.running),
    }


def main():
    def say(answer):
        print(json.dumps(answer), file=ANSWERS, flush=True)

    with tempfile.TemporaryDirectory() as model_dir:
        with open(os.path.join(model_dir, "config.json"), "w") as config:
            json.dump(LLAMA_2L, config)
        say({"vllm": vllm.__version__, "python": sys.version.split()[0]})
        for line in sys.stdin:
            say(measure(model_dir, **json.loads(line)))
            gc.collect()


if __name__ == "__main__":
    main()
