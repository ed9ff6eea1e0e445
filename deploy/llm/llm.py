"""`LLM`: offline generation in Python, with the same engine that serves HTTP."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import msgspec
from tqdm import tqdm

from longshore.deploy.llm.answer import MAX_LIVE_REQUESTS, Answer, request_output, run_answers
from longshore.deploy.llm.beams import BeamSearchParams, beam_sequence, run_searches
from longshore.deploy.llm.blocking_client import BlockingClient, EngineConnection
from longshore.deploy.llm.chats import ChatParameters, Message
from longshore.deploy.llm.engine_model import close_with, no_attribute, read_engine_model
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.llm.metrics import Metric, metrics_of
from longshore.deploy.llm.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    TranscriptionOutput,
)
from longshore.deploy.llm.pooler import Pooler, PoolingTask, pooled_answer
from longshore.deploy.llm.pooling_params import PoolingParams
from longshore.deploy.llm.progress import Progress, progress_bar
from longshore.deploy.llm.prompts import CachedPrompt, Prompt, PromptInput, value_errors
from longshore.deploy.llm.remote_engine import RemoteEngine
from longshore.deploy.llm.request_reader import CheckedParams, check_no_lora
from longshore.deploy.llm.sampling_params import SamplingParams
from longshore.deploy.llm.tokenization import as_tokenization
from longshore.deploy.llm.tokenizer import Tokenizer
from longshore.deploy.llm.transcriber import (
    SpeechRequest,
    as_list,
    check_speech_settings,
    transcribe,
)
from longshore.deploy.requests.audio import Audio
from longshore.deploy.requests.beam_search import BeamSearch
from longshore.deploy.requests.beam_search import BeamSearchParams as EngineBeamSearchParams
from longshore.deploy.requests.engine_run import EngineRun
from longshore.deploy.requests.live_requests import LiveRequests, seed_source
from longshore.deploy.requests.prompts import text_pairs
from longshore.deploy.requests.speech import Task
from longshore.deploy.requests.tracing import open_spans
from longshore.protocol.errors import EngineDead
from longshore.protocol.requests import PoolingParams as EnginePoolingParams

NOT_METHODS: Final = {
    "apply_model": "the model runs in worker processes, which take no functions",
    "collective_rpc": "the model runs in worker processes, which take no functions",
    "init_weight_transfer_engine": "weights do not change while an engine runs",
    "llm_engine": "an LLM has no other engine object; see its own methods",
    "reward": "use classify with use_activation=False",
    "set_tokenizer": "the tokenizer is that of the model folder",
    "sleep": "serve the model and use `longshore admin sleep`",
    "start_profile": "serve the model and use `longshore admin profile`",
    "stop_profile": "serve the model and use `longshore admin profile`",
    "update_weights": "weights do not change while an engine runs",
    "wake_up": "serve the model and use `longshore admin wake`",
}
"""Names of vLLM's `LLM` that do not exist here, and why."""


class LLM:
    """A model that answers prompts. Not thread-safe.

    By default, scheduler and worker run in their own processes, and this process never imports
    torch. With `in_process=True` both run in this process, for tests and debugging.

    Use it as a context manager, or call `close`. Otherwise its processes end with the object or
    with the program, however that ends.
    """

    def __init__(self, model: str | Path, *, in_process: bool = False, **settings: Any) -> None:
        """model: folder in Hugging Face format, GGUF file, or an id on a model hub.
        settings: fields of `EngineOptions`.

        Raises ConfigError, or StartFailed if a process cannot start, with the reason.
        """
        of_model = read_engine_model(model, settings)
        self._plan, self._reader, self._speech = of_model.plan, of_model.reader, of_model.speech
        options, self._model = self._plan.options, self._plan.model
        self._requests = LiveRequests(seed_source(options.seed))
        # No generator: an interrupt inside one would end it.
        self._request_ids = map("llm-{}".format, itertools.count(1))
        self._engine: EngineConnection = (
            InProcessEngine(self._plan) if in_process else RemoteEngine(self._plan)
        )
        self._client = BlockingClient(self._requests, self._engine)
        self._spans = open_spans(options.otlp_traces_endpoint, self._model.name)
        self._finalizer = close_with(self, self._engine, self._spans)

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute("LLM", name, NOT_METHODS)

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

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ValueError if the model folder has none."""
        return Tokenizer(self._reader.tokenizer())

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of the model's generation_config.json, and 16 tokens if it sets no limit."""
        return self._reader.default_params()

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics, with the names on /metrics; they can be a second old. Empty before
        the first."""
        self._check_open()
        with self._cleaned_up():
            stats = self._engine.stats()
        return [] if stats is None else metrics_of(stats)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False if a request or transfer holds blocks."""
        self._check_open()
        with self._cleaned_up():
            return self._engine.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        job_id: Sequence[str | None] | None = None,
        is_last_step: Sequence[bool] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or more prompts, all at once; returns outputs in the order of the prompts.

        prompts:         texts, lists of token ids, `{"prompt": ...}` or
                         `{"prompt_token_ids": [...]}`, the latter two also with the keys of
                         `CachedPrompt`.
        sampling_params: for all prompts, or one per prompt. None: the model's defaults.
        use_tqdm:        show a progress bar, or how to make one: a class like `tqdm`.
        lora_request:    None: LoRA adapters are not supported.
        priority:        of each prompt, for the scheduling policy `priority`; lower is earlier.
        job_id, is_last_step: of each prompt, the agent's job of which it is a turn, and whether no
                         other turn follows; for the scheduling policy `continuum`.
        tokenization_kwargs: `add_special_tokens`, `truncate_prompt_tokens`, `truncation_side`; see
                         `Tokenization`.
        Raises ValueError for an invalid prompt, EngineDead if the engine dies or is closed. An
        interrupt aborts running requests; the LLM stays usable.
        """
        self._check_takes(text=True)
        check_no_lora(lora_request)
        inputs = self._read_all(prompts, tokenization_kwargs)
        params = self._reader.check_each(sampling_params, len(inputs))
        return self._generate(
            inputs,
            params,
            use_tqdm=use_tqdm,
            priority=priority,
            job_id=job_id,
            is_last_step=is_last_step,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        *,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        job_id: Sequence[str | None] | None = None,
        is_last_step: Sequence[bool] | None = None,
        cache: CachedPrompt | Sequence[CachedPrompt | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or more chats; each is rendered to a prompt with the model's chat template.

        messages:      a chat or a list of chats, each a list of messages in OpenAI's format.
        chat_template: Jinja source of a template to use instead of the model's.
        chat_template_content_format: templates get the content of a message as text.
        add_generation_prompt: the prompt ends where the assistant's answer begins.
        continue_final_message: the prompt ends with the last message, to be continued.
        tools:         descriptions of tools, in OpenAI's format, for the template. The answer is
                       the model's text, including its calls.
        chat_template_kwargs: variables of the template.
        sampling_params: `structured_outputs` hold after the reasoning that the template's tags
                       show; the text has both.
        cache:         what is kept of the chats' KV, of all or of each.
        Other arguments and errors as in `generate`.
        """
        self._check_takes(text=True)
        check_no_lora(lora_request)
        if chat_template_content_format != "auto":
            raise ValueError(
                f"chat_template_content_format={chat_template_content_format!r} is not supported; "
                "templates get the content of a message as text"
            )
        inputs = self._reader.read_chats(
            messages,
            ChatParameters(
                add_generation_prompt, continue_final_message, tools, chat_template_kwargs
            ),
            chat_template=chat_template,
            tokenization=as_tokenization(tokenization_kwargs),
            cache=cache,
        )
        params = self._reader.check_each(sampling_params, len(inputs))
        return self._generate(
            inputs,
            params,
            use_tqdm=use_tqdm,
            priority=priority,
            job_id=job_id,
            is_last_step=is_last_step,
        )

    def _generate(
        self,
        inputs: Sequence[PromptInput],
        params: Sequence[CheckedParams],
        *,
        use_tqdm: Progress,
        priority: Sequence[int] | None = None,
        job_id: Sequence[str | None] | None = None,
        is_last_step: Sequence[bool] | None = None,
    ) -> list[RequestOutput]:
        priorities = [0] * len(inputs) if priority is None else priority
        if len(priorities) != len(inputs):
            raise ValueError(f"{len(priorities)} priorities for {len(inputs)} prompts")
        job_ids = [None] * len(inputs) if job_id is None else job_id
        last_steps = [False] * len(inputs) if is_last_step is None else is_last_step
        if not len(job_ids) == len(last_steps) == len(inputs):
            raise ValueError(f"job_id and is_last_step must have {len(inputs)} values, as prompts")
        request_ids = [next(self._request_ids) for _ in inputs]
        by_prompt = [
            self._reader.answers(
                request_id, prompt, checked, priority=importance, job_id=job, is_last_step=is_last
            )
            for request_id, prompt, checked, importance, job, is_last in zip(
                request_ids, inputs, params, priorities, job_ids, last_steps, strict=True
            )
        ]
        answers = [answer for group in by_prompt for answer in group]
        with progress_bar("generate", len(answers), use_tqdm) as bar:
            self._answer_all(answers, bar)
        return [
            request_output(request_id, group)
            for request_id, group in zip(request_ids, by_prompt, strict=True)
        ]

    def transcribe(
        self,
        audio: Audio | Sequence[Audio],
        *,
        language: str | None = None,
        task: Task = "transcribe",
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        use_tqdm: Progress = True,
    ) -> list[TranscriptionOutput]:
        """Transcribe one or more audio inputs, with a speech model.

        audio:    paths, file contents, or pairs of samples and rate, of any length. They are
                  decoded in groups of about four hours.
        language: code of the spoken language, such as `en`. None: it is detected per input.
        task:     `translate` returns English text.
        prompt:   preceding text, which sets the style and the spelling of names.
        sampling_params: None: greedy, without a token limit. There is one transcript of each input,
                  as plain text, so `n`, `stop`, `structured_outputs` and the like are rejected.
        Raises ValueError for invalid audio; otherwise as `generate`.
        """
        self._check_takes(text=False)
        assert self._speech is not None

        def answer(requests: Sequence[SpeechRequest]) -> list[RequestOutput]:
            answers = [
                self._reader.speech_answer(next(self._request_ids), request) for request in requests
            ]
            bar.total += len(answers)
            self._answer_all(answers, bar)
            return [request_output(answer.request_id, [answer]) for answer in answers]

        if sampling_params is None:
            sampling_params = SamplingParams(temperature=0, max_tokens=None)
        params = self._reader.check(sampling_params)
        check_speech_settings(params.settings)
        with progress_bar("transcribe", 0, use_tqdm) as bar:
            return transcribe(
                self._speech,
                as_list(audio),
                language=language,
                task=task,
                prompt=prompt,
                params=params.engine_params,
                answer=answer,
            )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding of each prompt, pooled from the hidden states after the model's last norm.
        Arguments and errors as in `generate`."""
        self._check_takes(text=True, vectors=True)
        check_no_lora(lora_request)
        inputs = self._read_all(prompts, tokenization_kwargs, gives_tokens=False)
        return self._pooler.embed(inputs, pooling_params or PoolingParams(), use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The label of each prompt, with a model for sequence classification. Arguments and errors
        as in `generate`."""
        self._check_takes(text=True, vectors=True, labels=True)
        check_no_lora(lora_request)
        inputs = self._read_all(prompts, tokenization_kwargs, gives_tokens=False)
        return self._pooler.classify(inputs, pooling_params or PoolingParams(), use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit each other: one of `data_1` with each of `data_2`, or as many of each.

        A model with a classification head of one label scores each pair in one prompt, other
        models give the cosine of the two embeddings. Of a pair in one prompt that is too long for
        `truncate_prompt_tokens`, the text of `data_2` is truncated. Other arguments and errors as
        in `generate`.
        """
        self._check_takes(text=True, vectors=True, labels=True)
        check_no_lora(lora_request)
        with value_errors():
            pairs = text_pairs(data_1, data_2, ("data_1", "data_2"))
        tokenization = as_tokenization(tokenization_kwargs)
        params = pooling_params or PoolingParams()
        return self._pooler.score(pairs, params, use_tqdm, tokenization)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What `embed` or `classify` return, as arrays in `outputs.data`. pooling_task: None: what
        the model is made for."""
        self._check_takes(text=True, vectors=True, labels=True)
        check_no_lora(lora_request)
        inputs = self._read_all(prompts, tokenization_kwargs, gives_tokens=False)
        params = pooling_params or PoolingParams()
        return self._pooler.encode(inputs, pooling_task, params, use_tqdm)

    def _read_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        tokenization_kwargs: Mapping[str, Any] | None,
        *,
        gives_tokens: bool = True,
    ) -> list[PromptInput]:
        return self._reader.read_all(
            prompts, gives_tokens=gives_tokens, tokenization=as_tokenization(tokenization_kwargs)
        )

    @property
    def _pooler(self) -> Pooler:
        """A new one each time: kept here, it would keep this object alive after its last use."""
        return Pooler(self._model, self._reader, self._pool)

    def _pool(
        self,
        what: str,
        prompts: Sequence[PromptInput],
        pooling: EnginePoolingParams,
        use_tqdm: Progress,
    ) -> list[Answer]:
        answers = [pooled_answer(next(self._request_ids), prompt, pooling) for prompt in prompts]
        with progress_bar(what, len(answers), use_tqdm) as bar:
            self._answer_all(answers, bar)
        return answers

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise EngineDead("this LLM has been closed")

    def _check_takes(self, *, text: bool, vectors: bool = False, labels: bool = False) -> None:
        """Raise EngineDead if this LLM is closed, ValueError if the model does not support the
        call."""
        self._check_open()
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
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The most likely answers to each prompt, found by a beam search equal to transformers'
        `generate(num_beams=...)`. Prompts and errors as in `generate`."""
        self._check_takes(text=True)
        searches = []
        for prompt in self._reader.read_all(prompts):
            ids = prompt.token_ids
            search_params = EngineBeamSearchParams(
                params.beam_width,
                min(params.max_tokens, self._plan.identity.max_model_len - len(ids)),
                params.length_penalty,
                params.early_stopping,
                frozenset() if params.ignore_eos else frozenset(self._model.eos_token_ids),
            )
            request_id = next(self._request_ids)
            searches.append(
                BeamSearch(self._client, request_id, ids, search_params, prompt.options)
            )
        with self._cleaned_up():
            max_live = max(1, MAX_LIVE_REQUESTS // params.beam_width)
            errors = run_searches(EngineRun(searches, max_live=max_live), self._client)
        return [
            BeamSearchOutput([], errors[search])
            if search in errors
            else BeamSearchOutput(
                [
                    beam_sequence(self._reader.decoder, search, finished)
                    for finished in search.finished
                ]
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

    def _answer_all(self, answers: Sequence[Answer], bar: "tqdm[Any]") -> None:
        with self._cleaned_up():
            run_answers(answers, self._client, bar, self._spans)

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
