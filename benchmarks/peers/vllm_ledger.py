"""vLLM's CPUOffloadingManager under `ledger_workload.py`. It reads jobs and writes their samples, one line of
JSON each; `benchmarks/offload_ledger.py` starts it in vLLM's environment.

Job: {"policy": "lru" | "arc", "at_a_time": 2048, "hits": 40, "stores": 40, "seed": 0}
"""

import os
import sys

# What the imports print must not get between the answers.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"

import json
from importlib.metadata import version

import ledger_workload
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

BLOCK_SIZE = 16


class Side:
    def __init__(self, policy):
        self.manager = CPUOffloadingManager(num_chunks=ledger_workload.CAPACITY, cache_policy=policy)
        self.num_requests = 0

    def begin(self, keys):
        self.num_requests += 1
        self.keys = keys
        self.context = ReqContext(req_id=f"r{self.num_requests}")
        for number, key in enumerate(keys, 1):
            self.context.set_offload_key_position(key, number * BLOCK_SIZE)
        self.manager.on_new_request(self.context)

    def lookup(self):
        lookup, context, hit = self.manager.lookup, self.context, LookupResult.HIT
        for number, key in enumerate(self.keys):
            if lookup(key, context) is not hit:
                return number
        return len(self.keys)

    def touch(self):
        self.manager.touch(self.keys, self.context)

    def prepare_load(self):
        self.manager.prepare_load(self.keys, self.context)

    def complete_load(self):
        self.manager.complete_load(self.keys, self.context)

    def prepare_store(self):
        return len(self.manager.prepare_store(self.keys, self.context).evicted_keys)

    def complete_store(self):
        self.manager.complete_store(self.keys, self.context)

    def finish(self):
        self.manager.on_request_finished(self.context)


def main():
    print(json.dumps({"vllm": version("vllm")}), file=ANSWERS)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(ledger_workload.measure(Side(job.pop("policy")), **job)), file=ANSWERS)


if __name__ == "__main__":
    main()
