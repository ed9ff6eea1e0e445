"""`longshore bench latency`: how long a batch of prompts takes, offline, through LLM."""

import time

import numpy as np

from longshore.deploy.bench.options import LatencyOptions
from longshore.deploy.bench.prompts import random_prompts
from longshore.deploy.bench.report import check_writable, conditions, percentiles_ms, write
from longshore.deploy.bench.throughput import check_answered, check_lengths, engine_settings
from longshore.deploy.llm.llm import LLM
from longshore.deploy.llm.sampling_params import SamplingParams
from longshore.deploy.model.folder import read_model_folder


def run(options: LatencyOptions) -> None:
    """Warm-up runs, then the measured runs, each with prompts that are not in the cache."""
    check_writable(options.json)
    model = read_model_folder(options.model)
    check_lengths(options, model)
    generator = np.random.default_rng(options.seed or 0)
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True)
    latencies_s = []
    with LLM(options.model, **engine_settings(options)) as llm:
        for number in range(options.num_iters_warmup + options.num_iters):
            prompts = random_prompts(
                options.batch_size,
                input_len=options.input_len,
                shared_prefix=0,
                vocab_size=model.vocab_size,
                generator=generator,
            )
            begin_s = time.perf_counter()
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
            )
            latency_s = time.perf_counter() - begin_s
            check_answered(outputs)
            if number >= options.num_iters_warmup:
                latencies_s.append(latency_s)
        settings_in_force = llm.settings_in_force
    result = {
        **conditions(options),
        "settings_in_force": settings_in_force,
        "latencies_s": [round(latency_s, 6) for latency_s in latencies_s],
        "latency_ms": percentiles_ms(latencies_s),
    }
    write(result, options.json)
