"""`LLM`: offline generation from plain Python, with the same engine that serves HTTP."""

import contextlib
import logging
import operator
import os
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import msgspec
from tqdm import tqdm

from longshore.deploy.engine import plan_engine
from longshore.deploy.gateway.detokenizer import IncrementalDetokenizer
from longshore.deploy.gateway.tokenizer import ModelTokenizer, load_tokenizer
from longshore.deploy.in_process_engine import InProcessEngine
from longshore.deploy.live_requests import LiveRequest, LiveRequests
from longshore.deploy.model_folder import ModelFolder, read_model_folder
from longshore.deploy.options import engine_options
from longshore.deploy.prompt_check import prompt_problem, sampling_problem
from longshore.deploy.remote_engine import RemoteEngine
from longshore.protocol.client import ClientRequest, EngineOutputs, FinishReason
from longshore.protocol.errors import EngineDead
from longshore.protocol.sampling import SamplingParams

Prompt: TypeAlias = str | Mapping[str, Sequence[int]]

TOKEN_IDS_KEY: Final = "prompt_token_ids"
DEFAULT_MAX_TOKENS: Final = 16
# Far more than run at a time; the rest waits here instead of filling the engine's queue.
MAX_LIVE_REQUESTS: Final = 16_384


class Engine(Protocol):
    """What carries requests: processes of its own, or objects in this one.

    num_blocks: in its KV cache, the null block included.
    """

    @property
    def num_blocks(self) -> int: ...

    def send(self, message: ClientRequest) -> None: ...

    def receive(self) -> EngineOutputs | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt.

    token_ids:         of the answer, a stop token included.
    text:              of the answer, without what stopped it; empty if the folder has no tokenizer.
    finish_reason:     `stop`, `length` or `error`.
    num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
    num_preemptions:   how often it lost its blocks and was computed again.
    error:             what went wrong, if something did.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    num_cached_tokens: int
    num_preemptions: int
    error: str | None = None


@dataclass
class _Answer:
    """One request on its way."""

    prompt_token_ids: list[int]
    live: LiveRequest | None = None


class LLM:
    """A model that answers prompts. Not thread-safe.

    By default scheduler and worker are processes of their own and this one never loads torch.
    With `in_process=True` both run here, for tests and debuggers.

    Use it as a context manager, or `close` it; if neither happens, its processes end with the
    object or with the program, however that ends.
    """

    def __init__(self, model: str | Path, *, in_process: bool = False, **settings: Any) -> None:
        """model: folder as Hugging Face writes it. settings: fields of `options.EngineOptions`.

        Raises ConfigError (StartFailed from a process) naming what keeps it from starting.
        """
        options = engine_options({"log_level": "warning", **settings})
        self._model = read_model_folder(Path(model))
        self._tokenizer = load_tokenizer(self._model.path, advice_level=logging.DEBUG)
        plan = plan_engine(options, self._model)
        self._plan = plan
        self._max_model_len = plan.identity.max_model_len
        self._requests = LiveRequests(options.seed)
        self._num_requests = 0
        self._engine: Engine = InProcessEngine(plan) if in_process else RemoteEngine(plan)
        self._finalizer = weakref.finalize(self, _close_in_owner, self._engine, os.getpid())

    @property
    def settings_in_force(self) -> dict[str, Any]:
        """What became of the settings: every default and `auto` resolved, as plain values."""
        return {
            "device": self._plan.device,
            "dtype": self._plan.identity.dtype,
            "scheduler": msgspec.to_builtins(self._plan.scheduler),
            "cache": {
                **msgspec.to_builtins(self._plan.cache),
                "num_blocks": self._engine.num_blocks,
            },
        }

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, all at once; the outputs stand in the order of the prompts.

        prompts: texts, or `{"prompt_token_ids": [...]}`.
        params:  for all, or one per prompt; None is the model's defaults and 16 tokens.
        Raises ValueError for a prompt that does not fit, EngineDead if the engine dies or is
        closed. An interrupt aborts what is running; the LLM stays usable.
        """
        if not self._finalizer.alive:
            raise EngineDead("this LLM has been closed")
        prompt_list = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params_list = self._params_per_prompt(params, len(prompt_list))
        answers = [
            _Answer(self._token_ids(prompt, index)) for index, prompt in enumerate(prompt_list)
        ]
        with tqdm(
            total=len(answers), desc="generate", unit="req", disable=not progress, file=sys.stderr
        ) as bar:
            try:
                self._run(answers, params_list, bar)
            except EngineDead as error:
                self._requests.fail_all(error)
                self.close()
                raise
            except BaseException:
                self._abort_all()
                raise
        return [self._output(answer) for answer in answers]

    def _params_per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = default_params(self._model)
        if isinstance(params, SamplingParams):
            params = [params] * num_prompts
        if len(params) != num_prompts:
            raise ValueError(f"{len(params)} params for {num_prompts} prompts; give one per prompt")
        for sampling in params:
            problem = sampling_problem(sampling, vocab_size=self._model.vocab_size)
            if problem is not None:
                raise ValueError(problem)
        return list(params)

    def _token_ids(self, prompt: Prompt, index: int) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError(
                    f"{self._model.path} has no tokenizer.json: give prompts as "
                    f'{{"{TOKEN_IDS_KEY}": [...]}}'
                )
            prompt.encode()  # a lone surrogate is a ValueError here, as every bad prompt is
            token_ids = self._tokenizer.encode(prompt)
        elif not isinstance(prompt, Mapping):
            raise ValueError(
                f'prompts[{index}] must be a text or {{"{TOKEN_IDS_KEY}": [...]}}, '
                f"it is a {type(prompt).__name__}"
            )
        elif set(prompt) == {TOKEN_IDS_KEY}:
            token_ids = _as_ids(prompt[TOKEN_IDS_KEY], index)
        else:
            raise ValueError(
                f'prompts[{index}] must be a text or {{"{TOKEN_IDS_KEY}": [...]}}, '
                f"it has the keys {sorted(prompt)}"
            )
        problem = prompt_problem(
            token_ids, vocab_size=self._model.vocab_size, max_model_len=self._max_model_len
        )
        if problem is not None:
            raise ValueError(f"prompts[{index}]: {problem}")
        return token_ids

    def _run(
        self, answers: Sequence[_Answer], params: Sequence[SamplingParams], bar: "tqdm[Any]"
    ) -> None:
        waiting = deque(zip(answers, params, strict=True))
        num_tokens = 0
        while True:
            while waiting and len(self._requests) < MAX_LIVE_REQUESTS:
                self._send(*waiting.popleft())
            if not (num_live := len(self._requests)):
                return
            outputs = self._engine.receive()
            if outputs is None:
                continue
            self._requests.apply(outputs)
            num_tokens += len(outputs.tokens)
            if (num_ended := num_live - len(self._requests)) > 0:
                elapsed_s = bar.format_dict["elapsed"] or 1.0
                bar.set_postfix_str(f"{num_tokens / elapsed_s:,.0f} tokens/s", refresh=False)
                bar.update(num_ended)

    def _send(self, answer: _Answer, sampling: SamplingParams) -> None:
        self._num_requests += 1
        answer.live, message = self._requests.open(
            f"llm-{self._num_requests}", answer.prompt_token_ids, sampling, on_change=_ignore
        )
        self._engine.send(message)

    def _abort_all(self) -> None:
        message = self._requests.abort(self._requests.all())
        if message is not None:
            with contextlib.suppress(EngineDead):  # nothing is left to abort
                self._engine.send(message)

    def _output(self, answer: _Answer) -> RequestOutput:
        live = answer.live
        assert live is not None
        assert live.finished is not None
        end = live.finished
        token_ids = live.take_token_ids()
        return RequestOutput(
            request_id=live.request_id,
            prompt_token_ids=answer.prompt_token_ids,
            token_ids=token_ids,
            text=_text(self._tokenizer, answer.prompt_token_ids, token_ids, end.reason),
            finish_reason=end.reason.api_name,
            num_cached_tokens=end.num_cached_tokens,
            num_preemptions=end.num_preemptions,
            error=end.message,
        )

    def close(self) -> None:
        """Stop the engine and leave nothing behind. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_ids(values: Sequence[int], index: int) -> list[int]:
    """Python's integers or numpy's, in a list or an array."""
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise ValueError(f"prompts[{index}]: a token id is a whole number: {error}") from error


def default_params(model: ModelFolder) -> SamplingParams:
    """What the model's generation_config.json asks for."""
    defaults = model.sampling_defaults
    return SamplingParams(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        max_tokens=DEFAULT_MAX_TOKENS,
    )


def _text(
    tokenizer: ModelTokenizer | None,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    reason: FinishReason,
) -> str:
    if tokenizer is None:
        return ""
    if reason is FinishReason.STOPPED:
        token_ids = token_ids[:-1]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids)
    return detokenizer.append(token_ids) + detokenizer.finish()


def _close_in_owner(engine: Engine, owner_pid: int) -> None:
    """Not in a forked copy of the process: the engine is its parent's."""
    if os.getpid() == owner_pid:
        engine.close()


def _ignore() -> None:
    return None
