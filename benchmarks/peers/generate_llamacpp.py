"""llama.cpp's batched decoding, greedy, with the protocol of `report.Peer`.

    {llamacpp environment}/bin/python generate_llamacpp.py FILE.gguf MAX_MODEL_LEN [--lookup]

The jobs are those of generate_vllm.py. Two threads; prompts of all requests are computed in batches of
2,048 tokens, then each step has one token of every request that has not ended. The KV cache is in
float16, llama.cpp's default, and all requests share it.

With `--lookup`, five drafts of one request are verified in a step: what followed the latest repetition of
its last tokens, of five to two of them.

A job with `windows`, lists of tokens, gets `log_probs` instead: of each token but the first of its
window; and `best`: the token with the highest one.
"""

import argparse
import ctypes
import json
import os
import sys
import time

NUM_THREADS = 2
BATCH_TOKENS = 2048
MAX_REQUESTS = 64
CACHE_TOKENS = 16384


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("model", metavar="FILE", help="GGUF file")
    arguments.add_argument("max_model_len", metavar="MAX_MODEL_LEN", type=int)
    arguments.add_argument("--lookup", action="store_true", help="verify drafts")
    options = arguments.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output; it must contain only answers
    import llama_cpp

    engine = Engine(llama_cpp, options.model)
    print(json.dumps({"llama_cpp_python": llama_cpp.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "windows" in job:
            scores = zip(*map(engine.score, job["windows"]))
            log_probs, best = (sum(lists, []) for lists in scores)
            print(json.dumps({"log_probs": log_probs, "best": best}), file=answers, flush=True)
            continue
        begin_s = time.perf_counter()
        generate = engine.generate_with_drafts if options.lookup else engine.generate
        generate(job["prompts"], job["output_lens"])
        wall_s = time.perf_counter() - begin_s
        print(json.dumps({"wall_s": wall_s}), file=answers, flush=True)


class Engine:
    """llama: the module llama_cpp."""

    def __init__(self, llama, path):
        self.llama = llama
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(path.encode(), params)
        assert self.model, f"{path} cannot be loaded"
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = CACHE_TOKENS, MAX_REQUESTS, True
        params.n_batch, params.n_threads, params.n_threads_batch = BATCH_TOKENS, NUM_THREADS, NUM_THREADS
        self.context = llama.llama_init_from_model(self.model, params)
        self.batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))

    def generate(self, prompts, output_lens):
        llama = self.llama
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        tokens = [
            (token, position, request, position + 1 == len(prompt))
            for request, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last = {}
        for first in range(0, len(tokens), BATCH_TOKENS):
            last.update(self.step(tokens[first : first + BATCH_TOKENS]))
        made = dict.fromkeys(range(len(prompts)), 1)
        while active := [i for i in made if made[i] < output_lens[i]]:
            last.update(
                self.step([(last[i], len(prompts[i]) + made[i] - 1, i, True) for i in active])
            )
            for i in active:
                made[i] += 1
        assert list(made.values()) == output_lens

    def generate_with_drafts(self, prompts, output_lens):
        """Of one request. Wrong drafts leave the cache before the next step."""
        llama, (prompt,), (output_len,) = self.llama, prompts, output_lens
        memory = llama.llama_get_memory(self.context)
        llama.llama_memory_clear(memory, True)
        lines = self.logits([(token, i, 0, i + 1 == len(prompt)) for i, token in enumerate(prompt)])
        known = [*prompt, *(int(line.argmax()) for _, line in lines)]
        while len(known) < len(prompt) + output_len:
            place = len(known) - 1
            drafts = looked_up(known)[: len(prompt) + output_len - len(known) - 1]
            tokens = [known[-1], *drafts]
            lines = self.logits([(token, place + i, 0, True) for i, token in enumerate(tokens)])
            sampled = [int(line.argmax()) for _, line in lines]
            num_right = 0
            while num_right < len(drafts) and drafts[num_right] == sampled[num_right]:
                num_right += 1
            known += sampled[: num_right + 1]
            llama.llama_memory_seq_rm(memory, 0, place + num_right + 1, -1)

    def score(self, window):
        """Log probabilities of its tokens but the first, and the most likely ones instead."""
        import numpy as np

        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)
        logits = self.logits([(token, i, 0, True) for i, token in enumerate(window)])
        lines = np.stack([line for _, line in logits][:-1]).astype(np.float64)
        normed = lines - np.logaddexp.reduce(lines, axis=1, keepdims=True)
        return normed[range(len(lines)), window[1:]].tolist(), lines.argmax(axis=1).tolist()

    def step(self, tokens):
        """The most likely next tokens, by request. tokens: (token, position, request, is_sampled)."""
        return {request: int(line.argmax()) for request, line in self.logits(tokens)}

    def logits(self, tokens):
        """(request, its logits) for each token that `is_sampled`; overwritten by the next call."""
        import numpy as np

        llama, batch = self.llama, self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, request, is_sampled) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_sampled
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, request
        assert llama.llama_decode(self.context, batch) == 0
        for i, (_, _, request, is_sampled) in enumerate(tokens):
            if is_sampled:
                logits = llama.llama_get_logits_ith(self.context, i)
                pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
                yield request, np.ctypeslib.as_array(pointer, (self.vocab_size,))


def looked_up(known):
    """What followed the latest repetition of the longest of the last 5 to 2 tokens."""
    for size in range(5, 1, -1):
        for start in range(len(known) - size - 1, -1, -1):
            if known[start : start + size] == known[-size:]:
                return known[start + size : start + size + 5]
    return []


if __name__ == "__main__":
    main()
