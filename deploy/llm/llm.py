"""`LLM`: offline generation in Python, with the same engine that serves HTTP."""

import contextlib
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from tqdm import tqdm

from longshore.deploy.cli.options import engine_options
from longshore.deploy.gateway.text.answer_text import AnswerText, StopStrings
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.gateway.text.tokenizer import load_tokenizer
from longshore.deploy.llm.answer import MAX_LIVE_REQUESTS, Answer, run_answers
from longshore.deploy.llm.beams import beam_output, run_searches
from longshore.deploy.llm.blocking_client import BlockingClient, EngineConnection
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
from longshore.deploy.llm.prompts import TOKEN_IDS_KEY, Prompt, prompt_token_ids
from longshore.deploy.llm.remote_engine import RemoteEngine
from longshore.deploy.llm.scores import (
    ClassificationRequestOutput,
    ScoringRequestOutput,
    classified,
    compared,
    scored,
    text_pairs,
)
from longshore.deploy.llm.transcriber import (
    SpeechRequest,
    as_list,
    transcribe,
)
from longshore.deploy.model.classifier import CLASSIFIED
from longshore.deploy.model.folder import ModelFolder, read_model_folder
from longshore.deploy.requests.audio import Audio
from longshore.deploy.requests.beam_search import BeamSearch, BeamSearchParams
from longshore.deploy.requests.live_requests import LiveRequests, seed_source
from longshore.deploy.requests.sample_params import sample_params
from longshore.deploy.requests.speech import SpeechModel, Task
from longshore.deploy.requests.validation import plain_params, sampling_problem
from longshore.deploy.supervisor.engine_config import plan_engine
from longshore.protocol.errors import EngineDead
from longshore.protocol.requests import PoolingKind, PoolingParams
from longshore.protocol.sampling import SamplingParams

DEFAULT_MAX_TOKENS: Final = 16


class LLM:
    """A model that answers prompts. Not thread-safe.

    By default, scheduler and worker run in their own processes, and this process never imports
    torch. With `in_process=True` both run in this process, for tests and debugging.

    Use it as a context manager, or call `close`. Otherwise its processes end with the object or
    with the program, however that ends.
    """

    def __init__(self, model: str | Path, *, in_process: bool = False, **settings: Any) -> None:
        """model: folder in Hugging Face format, or an id on a model hub.
        settings: fields of `EngineOptions`.

        Raises ConfigError, or StartFailed if a process cannot start, with the reason.
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
        # No generator: an interrupt inside one would end it.
        self._request_ids = map("llm-{}".format, itertools.count(1))
        self._engine: EngineConnection = InProcessEngine(plan) if in_process else RemoteEngine(plan)
        self._client = BlockingClient(self._requests, self._engine)
        self._finalizer = weakref.finalize(self, _close_in_owner, self._engine, os.getpid())

    @property
    def settings_in_force(self) -> dict[str, Any]:
        """The resulting settings as plain values, with every default and `auto` resolved."""
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
        """Answer one or more prompts, all at once; returns outputs in the order of the prompts.

        prompts: texts, or `{"prompt_token_ids": [...]}`.
        params:  for all prompts, or one per prompt. None: the model's defaults, and 16 tokens if
                 the model sets no limit.
        n:       answers per prompt, which are consecutive. They share the prompt's blocks. Each has
                 its own seed, derived from the seed in `params`, if any.
        stop:    strings that end an answer, after at least `min_tokens` tokens. The answer excludes
                 them, unless `include_stop_str_in_output`.
        Raises ValueError for an invalid prompt, EngineDead if the engine dies or is closed. An
        interrupt aborts running requests; the LLM stays usable.
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
            stops = StopStrings(texts, include_stop_str_in_output, sampling.min_tokens)
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
        """Transcribe one or more audio inputs, with a speech model.

        audio:    paths, file contents, or pairs of samples and rate, of any length. They are
                  decoded in groups of about four hours.
        language: code of the spoken language, such as `en`. None: it is detected per input.
        task:     `translate` returns English text.
        prompt:   preceding text, which sets the style and the spelling of names.
        params:   None: greedy, without a token limit.
        Raises ValueError for invalid audio; otherwise as `generate`.
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
        """An embedding of each prompt, pooled from the hidden states after the model's last norm.

        kind:       `last`, `mean` or `cls`. None: the model folder's setting, else `last`.
        normalize:  normalize to length 1. None: the model folder's setting, else True.
        dimensions: number of leading elements to keep.
        Other arguments and errors as in `generate`.
        """
        self._check_takes(text=True, vectors=True)
        assert self._model.embedding is not None
        pooling = self._model.embedding.pooling(
            kind=kind, normalize=normalize, dimensions=dimensions
        )
        return self._pooled("embed", prompts, pooling, progress=progress)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool = True,
        progress: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """The label of each prompt, with a model for sequence classification.

        use_activation: False returns scores before the head's activation, as `probs`.
        Other arguments and errors as in `generate`.
        """
        self._check_takes(text=True, vectors=True, labels=True)
        classifier = self._model.classifier
        if classifier is None:
            raise ValueError(f"{self._model.name} has no classification head")
        ends = self._pooled("classify", prompts, CLASSIFIED, progress=progress)
        return [classified(end, classifier, use_activation=use_activation) for end in ends]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_activation: bool = True,
        progress: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit each other: one `text_1` with each of `text_2`, or as many of each.

        A model with a classification head of one label scores each pair in one prompt, other
        models give the cosine of the two embeddings.
        use_activation: False returns scores before the head's activation.
        Other arguments and errors as in `generate`.
        """
        self._check_takes(text=True, vectors=True, labels=True)
        pairs = text_pairs(text_1, text_2)
        classifier, tokenizer = self._model.classifier, self._tokenizer
        if classifier is None:
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            vectors = self.embed(texts, normalize=True, progress=progress)
            ends = dict(zip(texts, vectors, strict=True))
            return [compared(ends[one], ends[other]) for one, other in pairs]
        if len(classifier.labels) > 1:
            raise ValueError(
                f"{self._model.name} has {len(classifier.labels)} labels, so no single score: use "
                "LLM.classify"
            )
        if tokenizer is None:
            raise ValueError(f"{self._model.path} has no tokenizer.json, which pairs need")
        prompts = [
            {TOKEN_IDS_KEY: tokenizer.join(tokenizer.part(one), tokenizer.part(other))}
            for one, other in pairs
        ]
        outputs = self.classify(prompts, use_activation=use_activation, progress=progress)
        return [scored(output) for output in outputs]

    def _pooled(
        self,
        what: str,
        prompts: Prompt | Sequence[Prompt],
        pooling: PoolingParams,
        *,
        progress: bool,
    ) -> list[EmbeddingOutput]:
        answers = pooled_answers(self._token_ids(prompts, gives_tokens=False), pooling)
        with _progress_bar(what, len(answers), is_shown=progress) as bar, self._cleaned_up():
            run_answers(answers, self._client, self._request_ids, bar)
        return [embedding_output(answer) for answer in answers]

    def _check_takes(self, *, text: bool, vectors: bool = False, labels: bool = False) -> None:
        """Raise EngineDead if this LLM is closed, ValueError if the model does not support the
        call."""
        if not self._finalizer.alive:
            raise EngineDead("this LLM has been closed")
        if text and self._speech is not None:
            raise ValueError(f"{self._model.name} is a speech model: use LLM.transcribe")
        if not text and self._speech is None:
            raise ValueError(f"{self._model.name} takes text, not audio: use LLM.generate")
        if not labels and self._model.classifier is not None:
            raise ValueError(f"{self._model.name} classifies text: use LLM.classify or LLM.score")
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
        """The `beam_width` most likely answers to each prompt, found by a beam search equal to
        transformers' `generate(num_beams=...)`; see `BeamSearchParams`.

        max_tokens: limit of output tokens; the model's length limits them too.
        Other arguments and errors as in `generate`.
        """
        self._check_takes(text=True)
        searches = []
        for ids in self._token_ids(prompts):
            params = BeamSearchParams(
                beam_width,
                min(max_tokens, self._max_model_len - len(ids)),
                length_penalty,
                early_stopping,
                frozenset() if ignore_eos else frozenset(self._model.eos_token_ids),
            )
            request_id = next(self._request_ids)
            searches.append(
                BeamSearch(self._client, request_id, ids, params, on_change=lambda: None)
            )
        with self._cleaned_up():
            max_live = max(1, MAX_LIVE_REQUESTS // beam_width)
            errors = run_searches(searches, self._client, max_live=max_live)
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
        """On an interrupt or error, abort all requests; if the engine has died, close it."""
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
            raise ValueError(f"{len(params)} params for {num_prompts} prompts; pass one per prompt")
        params = [plain_params(sampling) for sampling in params]
        for sampling in params:
            problem = sampling_problem(sampling, vocab_size=self._model.vocab_size)
            if problem is not None:
                raise ValueError(problem)
        return params

    def _token_ids(
        self, prompts: Prompt | Sequence[Prompt], *, gives_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each prompt. Raises ValueError naming an invalid prompt."""
        prompt_list = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        limits = {"vocab_size": self._model.vocab_size, "max_model_len": self._max_model_len}
        return [
            prompt_token_ids(
                prompt,
                index,
                self._tokenizer,
                self._model.path,
                gives_tokens=gives_tokens,
                **limits,
            )
            for index, prompt in enumerate(prompt_list)
        ]

    def _answer_all(self, answers: Sequence[Answer], bar: "tqdm[Any]") -> list[RequestOutput]:
        with self._cleaned_up():
            run_answers(answers, self._client, self._request_ids, bar)
        return [answer.output(self._decoder) for answer in answers]

    def _watched(self, prompt_token_ids: list[int], stops: StopStrings) -> AnswerText | None:
        if not stops.texts:
            return None
        if self._tokenizer is None:
            raise ValueError(f"stop needs a tokenizer, but {self._model.path} has none")
        if not all(stops.texts):
            raise ValueError("stop has an empty string")
        return AnswerText(self._tokenizer, prompt_token_ids, stops)

    def _abort_all(self) -> None:
        with contextlib.suppress(EngineDead):  # nothing is left to abort
            self._client.abort(self._requests.all())

    def close(self) -> None:
        """Stop the engine and remove its processes and files. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _progress_bar(what: str, num_requests: int, *, is_shown: bool) -> "tqdm[Any]":
    return tqdm(total=num_requests, desc=what, unit="req", disable=not is_shown, file=sys.stderr)


def default_params(model: ModelFolder) -> SamplingParams:
    """The defaults of the model's generation_config.json."""
    defaults = model.sampling_defaults
    return SamplingParams(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
        max_tokens=DEFAULT_MAX_TOKENS if defaults.max_tokens is None else defaults.max_tokens,
    )


def _close_in_owner(engine: EngineConnection, owner_pid: int) -> None:
    """Do nothing in a forked child: the engine belongs to its parent."""
    if os.getpid() == owner_pid:
        engine.close()
