"""`LLM`: offline generation from plain Python, with the same engine that serves HTTP."""

import contextlib
import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from tqdm import tqdm

from longshore.deploy.cli.options import engine_options
from longshore.deploy.gateway.text.answer_text import AnswerText, Stops
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.gateway.text.tokenizer import load_tokenizer
from longshore.deploy.llm.answer import Answer
from longshore.deploy.llm.beams import beam_output, run_searches
from longshore.deploy.llm.carrier import Carrier, Engine
from longshore.deploy.llm.embeddings import (
    EmbeddingOutput,
    embedding_output,
    pooled_answers,
)
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.llm.outputs import (
    BeamSearchOutput,
    RequestOutput,
    TranscriptionOutput,
)
from longshore.deploy.llm.prompts import Prompt, prompt_token_ids
from longshore.deploy.llm.remote_engine import RemoteEngine
from longshore.deploy.llm.transcriber import (
    SpeechRequest,
    as_list,
    transcribe,
)
from longshore.deploy.model.folder import ModelFolder, read_model_folder
from longshore.deploy.requests.audio import Audio
from longshore.deploy.requests.beam_search import BeamSearch, BeamSearchParams
from longshore.deploy.requests.live_requests import LiveRequests, seed_source
from longshore.deploy.requests.prompt_check import plain_params, sampling_problem
from longshore.deploy.requests.samples import sample_params
from longshore.deploy.requests.speech import SpeechModel, Task
from longshore.deploy.supervisor.engine_config import plan_engine
from longshore.protocol.errors import EngineDead
from longshore.protocol.requests import PoolingKind
from longshore.protocol.sampling import SamplingParams

DEFAULT_MAX_TOKENS: Final = 16
# Far more than run at a time; the rest waits here instead of filling the engine's queue.
MAX_LIVE_REQUESTS: Final = 16_384


class LLM:
    """A model that answers prompts. Not thread-safe.

    By default scheduler and worker are processes of their own and this one never loads torch.
    With `in_process=True` both run here, for tests and debuggers.

    Use it as a context manager, or `close` it; if neither happens, its processes end with the
    object or with the program, however that ends.
    """

    def __init__(self, model: str | Path, *, in_process: bool = False, **settings: Any) -> None:
        """model: folder as Hugging Face writes it, or its id on a model hub.
        settings: fields of `options.EngineOptions`.

        Raises ConfigError (StartFailed from a process) naming what keeps it from starting.
        """
        options = engine_options({"log_level": "warning", **settings})
        self._model = read_model_folder(model)
        self._tokenizer = load_tokenizer(self._model.path, advice_level=logging.DEBUG)
        plan = plan_engine(options, self._model)
        self._plan = plan
        self._max_model_len = plan.identity.max_model_len
        self._decoder: TokenDecoder | None = self._tokenizer
        self._speech: SpeechModel | None = None
        if self._model.audio is not None:
            self._speech = SpeechModel(
                self._model.path,
                self._model.audio,
                self._tokenizer,
                vocab_size=self._model.vocab_size,
                max_model_len=self._max_model_len,
            )
            self._decoder = self._speech.tokenizer
        self._requests = LiveRequests(seed_source(options.seed))
        self._num_requests = 0
        self._engine: Engine = InProcessEngine(plan) if in_process else RemoteEngine(plan)
        self._carrier = Carrier(self._requests, self._engine)
        self._finalizer = weakref.finalize(self, _close_in_owner, self._engine, os.getpid())

    @property
    def settings_in_force(self) -> dict[str, Any]:
        """What became of the settings: every default and `auto` resolved, as plain values."""
        return {
            "device": self._plan.device,
            "dtype": self._plan.identity.dtype,
            "kv_cache_dtype": self._plan.identity.kv_cache_dtype,
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
        n: int = 1,
        stop: str | Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, all at once; the outputs stand in the order of the prompts.

        prompts: texts, or `{"prompt_token_ids": [...]}`.
        params:  for all, or one per prompt; None is the model's defaults, else 16 tokens.
        n:       answers to each prompt, which stand together. They share the prompt's blocks, and
                 each draws with a seed of its own, that follows from the one in `params`, if any.
        stop:    texts that end an answer, which is given without them, unless
                 `include_stop_str_in_output`; no earlier than its `min_tokens`.
        Raises ValueError for a prompt that does not fit, EngineDead if the engine dies or is
        closed. An interrupt aborts what is running; the LLM stays usable.
        """
        self._check_takes(text=True)
        if n < 1:
            raise ValueError(f"n={n} must be at least 1")
        token_ids = self._token_ids(prompts)
        params_list = self._params_per_prompt(params, len(token_ids))
        texts = tuple([stop] if isinstance(stop, str) else stop)
        answers: list[Answer] = []
        for ids, sampling in zip(token_ids, params_list, strict=True):
            first = None
            stops = Stops(texts, include_stop_str_in_output, sampling.min_tokens)
            for index, sample in enumerate(sample_params(sampling, n)):
                answers.append(Answer(ids, sample, index, first, self._watched(ids, stops)))
                first = first or answers[-1]
        with _progress_bar("generate", len(answers), is_shown=progress) as bar:
            return self._answer_all(answers, bar)

    def transcribe(
        self,
        audio: Audio | Sequence[Audio],
        *,
        language: str | None = None,
        task: Task = "transcribe",
        prompt: str | None = None,
        params: SamplingParams | None = None,
        progress: bool = True,
    ) -> list[TranscriptionOutput]:
        """What is said in one audio or many; for models that turn audio into text.

        audio:    paths, contents of files, or pairs of samples and rate; of any length. Not all are
                  held at once: as many as have some four hours together, or a longer one.
        language: code of what is spoken, as `en`; None has it detected, once per audio.
        task:     `translate` answers in English.
        prompt:   text that is taken to stand before the audio's, for its style and names.
        params:   None is greedy, to the end.
        Raises ValueError for what cannot be transcribed; else as `generate`.
        """
        self._check_takes(text=False)
        assert self._speech is not None

        def answer(requests: Sequence[SpeechRequest]) -> list[RequestOutput]:
            answers = [
                Answer(
                    each.prompt_token_ids,
                    each.sampling,
                    multimodal=(each.feature,),
                    num_primed=each.num_primed,
                )
                for each in requests
            ]
            bar.total += len(answers)
            return self._answer_all(answers, bar)

        if params is None:
            params = SamplingParams(temperature=0, max_tokens=None)
        (params,) = self._params_per_prompt(params, 1)
        with _progress_bar("transcribe", 0, is_shown=progress) as bar:
            return transcribe(
                self._speech,
                as_list(audio),
                language=language,
                task=task,
                prompt=prompt,
                params=params,
                answer=answer,
            )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        kind: PoolingKind | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        progress: bool = True,
    ) -> list[EmbeddingOutput]:
        """A vector of each prompt, of the hidden states behind the model's last norm.

        kind:       `last`, `mean` or `cls`; None is the folder's way, else the last token's.
        normalize:  to length 1; None is the folder's way, else yes.
        dimensions: leading elements to keep.
        Other arguments and errors as in `generate`.
        """
        self._check_takes(text=True, vectors=True)
        assert self._model.embedding is not None
        pooling = self._model.embedding.pooling(
            kind=kind, normalize=normalize, dimensions=dimensions
        )
        answers = pooled_answers(self._token_ids(prompts), pooling)
        with _progress_bar("embed", len(answers), is_shown=progress) as bar, self._cleaned_up():
            self._run(answers, bar)
        return [embedding_output(answer) for answer in answers]

    def _check_takes(self, *, text: bool, vectors: bool = False) -> None:
        """Raise EngineDead if it is closed, ValueError if the model takes the other, or gives
        vectors alone."""
        if not self._finalizer.alive:
            raise EngineDead("this LLM has been closed")
        if text and self._speech is not None:
            raise ValueError(f"{self._model.name} turns audio into text: use LLM.transcribe")
        if not text and self._speech is None:
            raise ValueError(f"{self._model.name} takes text, no audio: use LLM.generate")
        embedding = self._model.embedding
        if not vectors and embedding is not None and embedding.is_only:
            raise ValueError(f"{self._model.name} has no output head: use LLM.embed")

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        beam_width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        ignore_eos: bool = False,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` likeliest answers to each prompt, searched as transformers'
        `generate(num_beams=...)` does; see `BeamSearchParams`.

        max_tokens: of an answer, at most what the model's length leaves. Other arguments and errors
                    as in `generate`.
        """
        self._check_takes(text=True)
        searches = []
        for ids in self._token_ids(prompts):
            self._num_requests += 1
            params = BeamSearchParams(
                beam_width,
                min(max_tokens, self._max_model_len - len(ids)),
                length_penalty,
                early_stopping,
                frozenset() if ignore_eos else frozenset(self._model.eos_token_ids),
            )
            name = f"llm-{self._num_requests}"
            searches.append(BeamSearch(self._carrier, name, ids, params, on_change=_ignore))
        with self._cleaned_up():
            max_live = max(1, MAX_LIVE_REQUESTS // beam_width)
            errors = run_searches(searches, self._carrier, max_live=max_live)
        return [
            BeamSearchOutput(list(search.prompt_token_ids), [], errors[search])
            if search in errors
            else BeamSearchOutput(
                list(search.prompt_token_ids),
                [beam_output(self._decoder, search, finished) for finished in search.finished],
            )
            for search in searches
        ]

    @contextlib.contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """What is interrupted leaves nothing running; a dead engine is closed."""
        try:
            yield
        except EngineDead as error:
            self._requests.fail_all(error)
            self.close()
            raise
        except BaseException:
            self._abort_all()
            raise

    def _params_per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = default_params(self._model)
        if isinstance(params, SamplingParams):
            params = [params] * num_prompts
        if len(params) != num_prompts:
            raise ValueError(f"{len(params)} params for {num_prompts} prompts; give one per prompt")
        params = [plain_params(sampling) for sampling in params]
        for sampling in params:
            problem = sampling_problem(sampling, vocab_size=self._model.vocab_size)
            if problem is not None:
                raise ValueError(problem)
        return params

    def _token_ids(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        """Of each prompt. Raises ValueError naming the one that cannot be answered."""
        prompt_list = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        limits = {"vocab_size": self._model.vocab_size, "max_model_len": self._max_model_len}
        return [
            prompt_token_ids(prompt, index, self._tokenizer, self._model.path, **limits)
            for index, prompt in enumerate(prompt_list)
        ]

    def _answer_all(self, answers: Sequence[Answer], bar: "tqdm[Any]") -> list[RequestOutput]:
        with self._cleaned_up():
            self._run(answers, bar)
        return [answer.output(self._decoder) for answer in answers]

    def _run(self, answers: Sequence[Answer], bar: "tqdm[Any]") -> None:
        waiting = deque(answers)
        num_tokens = 0
        while True:
            while waiting and len(self._requests) < MAX_LIVE_REQUESTS:
                self._send(waiting.popleft())
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

    def _send(self, answer: Answer) -> None:
        self._num_requests += 1
        answer.live = self._carrier.submit(
            f"llm-{self._num_requests}",
            answer.prompt_token_ids,
            answer.sampling,
            on_change=_ignore if answer.text is None else partial(self._grown, answer),
            fork_of=None if answer.first is None else answer.first.live,
            multimodal=answer.multimodal,
            num_primed=answer.num_primed,
            pooling=answer.pooling,
        )

    def _watched(self, prompt_token_ids: list[int], stops: Stops) -> AnswerText | None:
        if not stops.texts:
            return None
        if self._tokenizer is None:
            raise ValueError(f"stop needs a tokenizer, and {self._model.path} has none")
        if not all(stops.texts):
            raise ValueError("stop holds an empty text")
        return AnswerText(self._tokenizer, prompt_token_ids, stops)

    def _grown(self, answer: Answer) -> None:
        num_kept = answer.grow()
        if num_kept is not None and answer.live is not None:
            self._carrier.stop(answer.live, num_kept)

    def _abort_all(self) -> None:
        with contextlib.suppress(EngineDead):  # nothing is left to abort
            self._carrier.abort(self._requests.all())

    def close(self) -> None:
        """Stop the engine and leave nothing behind. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _progress_bar(what: str, num_requests: int, *, is_shown: bool) -> "tqdm[Any]":
    return tqdm(total=num_requests, desc=what, unit="req", disable=not is_shown, file=sys.stderr)


def default_params(model: ModelFolder) -> SamplingParams:
    """What the model's generation_config.json asks for."""
    defaults = model.sampling_defaults
    return SamplingParams(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
        max_tokens=DEFAULT_MAX_TOKENS if defaults.max_tokens is None else defaults.max_tokens,
    )


def _close_in_owner(engine: Engine, owner_pid: int) -> None:
    """Not in a forked copy of the process: the engine is its parent's."""
    if os.getpid() == owner_pid:
        engine.close()


def _ignore() -> None:
    return None
