"""`longshore bench throughput`: tokens per second for a batch of prompts."""

import time
from dataclasses import fields
from typing import Any

import numpy as np

from longshore.deploy.bench.options import LatencyOptions, ThroughputOptions
from longshore.deploy.bench.prompts import random_prompts
from longshore.deploy.bench.report import check_writable, conditions, spread, write
from longshore.deploy.llm.llm import LLM
from longshore.deploy.llm.outputs import RequestOutput
from longshore.deploy.llm.sampling_params import SamplingParams
from longshore.deploy.model.folder import ModelFolder, read_model_folder
from longshore.deploy.settings.options import EngineOptions
from longshore.protocol.errors import ConfigError, EngineDead


def run(options: ThroughputOptions) -> None:
    """A warm-up run, then the measured runs, each with prompts that are not in the cache."""
    check_writable(options.json)
    model = read_model_folder(options.model)
    check_lengths(options, model)
    generator = np.random.default_rng(options.seed or 0)
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True)
    runs = []
    with LLM(options.model, in_process=options.in_process, **engine_settings(options)) as llm:
        for repeat in range(options.repeats + 1):
            prompts = random_prompts(
                options.num_prompts,
                input_len=options.input_len,
                shared_prefix=options.shared_prefix,
                vocab_size=model.vocab_size,
                generator=generator,
            )
            begin_s = time.perf_counter()
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
            )
            wall_s = time.perf_counter() - begin_s
            check_answered(outputs)
            if repeat > 0:
                runs.append(_measured(outputs, wall_s))
        settings_in_force = llm.settings_in_force
    result = {
        **conditions(options),
        "settings_in_force": settings_in_force,
        "runs": runs,
        **{name: spread([run[name] for run in runs]) for name in runs[0]},
    }
    write(result, options.json)


def check_lengths(options: ThroughputOptions | LatencyOptions, model: ModelFolder) -> None:
    """Raise ConfigError if a request is longer than the model's limit."""
    longest = min(model.max_model_len, options.max_model_len or model.max_model_len)
    if options.input_len + options.output_len > longest:
        raise ConfigError(
            f"input_len={options.input_len} plus output_len={options.output_len} is "
            f"{options.input_len + options.output_len} tokens; the limit of {options.model} is "
            f"{longest}"
        )


def engine_settings(options: EngineOptions) -> dict[str, Any]:
    """The settings of a benchmark's engine, for LLM."""
    return {field.name: getattr(options, field.name) for field in fields(EngineOptions)}


def check_answered(outputs: list[RequestOutput]) -> None:
    """Raise EngineDead if a request failed."""
    for output in outputs:
        if output.outputs[0].error is not None:
            raise EngineDead(f"{output.request_id} failed: {output.outputs[0].error}")


def _measured(outputs: list[RequestOutput], wall_s: float) -> dict[str, float]:
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "wall_s": round(wall_s, 4),
        "requests_per_s": round(len(outputs) / wall_s, 3),
        "output_tokens_per_s": round(num_output_tokens / wall_s, 1),
        "total_tokens_per_s": round((num_prompt_tokens + num_output_tokens) / wall_s, 1),
        "output_tokens": num_output_tokens,
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "preemptions": sum(output.outputs[0].num_preemptions for output in outputs),
    }
