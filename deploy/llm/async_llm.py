"""`AsyncLLM`: streams of answers on an asyncio loop, with an engine in processes of its own."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from longshore.deploy.gateway.engines.engine_client import EngineClient
from longshore.deploy.llm.answer import Answer, request_output
from longshore.deploy.llm.engine_model import close_with, no_attribute, read_engine_model
from longshore.deploy.llm.engine_processes import EngineProcesses
from longshore.deploy.llm.metrics import Metric, metrics_of
from longshore.deploy.llm.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
)
from longshore.deploy.llm.pooler import encoding, pooled_answer, pooled_output
from longshore.deploy.llm.pooling_params import PoolingParams
from longshore.deploy.llm.prompts import Prompt, PromptInput
from longshore.deploy.llm.request_reader import CheckedParams, check_no_lora
from longshore.deploy.llm.sampling_params import RequestOutputKind, SamplingParams
from longshore.deploy.llm.tokenization import Tokenization, as_tokenization
from longshore.deploy.llm.tokenizer import Tokenizer
from longshore.deploy.requests.live_requests import seed_source
from longshore.deploy.requests.tracing import open_spans
from longshore.protocol.commands import ResetCache
from longshore.protocol.errors import EngineDead
from longshore.protocol.handshake import ClientHello
from longshore.protocol.outputs import FinishReason
from longshore.protocol.statistics import SchedulerStats

if TYPE_CHECKING:
    from longshore.deploy.requests.spans import RequestSpans

DEATH_CHECK_S: Final = 1.0
COMMAND_POLL_S: Final = 0.01

NOT_METHODS: Final = {
    "add_lora": "LoRA adapters are not supported; merge them into the weights",
    "collective_rpc": "the model runs in worker processes, which take no functions",
    "pause_generation": "abort the requests",
    "sleep": "serve the model and use `longshore admin sleep`",
    "start_profile": "serve the model and use `longshore admin profile`",
    "stop_profile": "serve the model and use `longshore admin profile`",
    "wake_up": "serve the model and use `longshore admin wake`",
}
"""Names of vLLM's `AsyncLLM` that do not exist here, and why."""


class AsyncEngineArgs:
    """A model and settings, for `AsyncLLM.from_engine_args`; see `AsyncLLM`."""

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self.model = model
        self.settings = settings


class AsyncLLM:
    """A model that streams answers. All methods belong to the event loop of the first request.

    Use it as an async context manager, or call `shutdown`. Otherwise its processes end with the
    object or with the program, however that ends.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        """model: folder in Hugging Face format, GGUF file, or an id on a model hub.
        settings: fields of `EngineOptions`, also with vLLM's names.

        Returns when the engine is ready. Raises ConfigError, or StartFailed if a process cannot
        start, with the reason.
        """
        of_model = read_engine_model(model, settings)
        self._plan, self._reader = of_model.plan, of_model.reader
        options, self._model = self._plan.options, self._plan.model
        if of_model.speech is not None:
            raise ValueError(f"{self._model.name} is a speech model: use LLM.transcribe")
        self._seeds = seed_source(options.seed)
        self._streams: dict[str, _Stream] = {}
        self._stats: SchedulerStats | None = None
        self._client: EngineClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._processes = EngineProcesses(self._plan)
        self._spans = open_spans(options.otlp_traces_endpoint, self._model.name)
        self._finalizer = close_with(self, self._processes, self._spans)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> "AsyncLLM":
        return cls(engine_args.model, **engine_args.settings)

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute("AsyncLLM", name, NOT_METHODS)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: None = None,
        priority: int = 0,
        job_id: str | None = None,
        is_last_step: bool = False,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The answers to a prompt as they grow; see `SamplingParams.output_kind`. The last output
        is `finished`. If the iterator is closed, or its task cancelled, the request is aborted.

        prompt:     a text, token ids, `{"prompt": ...}` or `{"prompt_token_ids": [...]}`.
        request_id: no other live request may have it.
        lora_request: None: LoRA adapters are not supported.
        priority:   for the scheduling policy `priority`; lower is earlier.
        job_id, is_last_step: the agent's job of which this is a turn, and whether no other turn
                    follows; for the scheduling policy `continuum`.
        tokenization_kwargs: see `LLM.generate`.
        trace_headers: W3C trace context of what the request belongs to, for its spans.
        Raises ValueError for an invalid prompt or setting, EngineDead if the engine dies or is shut
        down.
        """
        check_no_lora(lora_request)
        embedding = self._model.embedding
        if self._model.classifier is not None or (embedding is not None and embedding.is_only):
            raise ValueError(f"{self._model.name} has no output head: use AsyncLLM.encode")
        tokenization = as_tokenization(tokenization_kwargs)
        client = await self._connect()
        params = await self._check(sampling_params)
        with self._stream(request_id, sampling_params.output_kind) as stream:
            read = await self._read(prompt, tokenization)
            answers = self._reader.answers(
                request_id,
                read,
                params,
                priority=priority,
                job_id=job_id,
                is_last_step=is_last_step,
                trace_headers=trace_headers,
            )
            stream.begin(client, answers)
            async for output in stream.outputs():
                yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        lora_request: None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """One output: the embedding of a prompt or, for models that classify, the probabilities of
        the labels, in `outputs.data`. Arguments and errors as in `generate`."""
        check_no_lora(lora_request)
        how = encoding(self._model, None, pooling_params)
        tokenization = as_tokenization(tokenization_kwargs)
        client = await self._connect()
        with self._stream(request_id, RequestOutputKind.FINAL_ONLY) as stream:
            read = await self._read(prompt, tokenization, gives_tokens=False)
            answer = pooled_answer(
                request_id, read, how.pooling, priority=priority, trace_headers=trace_headers
            )
            stream.begin(client, [answer])
            async for _ in stream.outputs():
                yield pooled_output(answer, how.output)

    @contextlib.contextmanager
    def _stream(self, request_id: str, kind: RequestOutputKind) -> Iterator["_Stream"]:
        """A stream that can be aborted by its id, and is at the end. Raises ValueError if another
        live request has the id."""
        if request_id in self._streams:
            raise ValueError(f"request_id={request_id!r} is that of a live request")
        stream = self._streams[request_id] = _Stream(request_id, kind)
        try:
            yield stream
        finally:
            stream.abort()
            if self._spans is not None:
                stream.make_spans(self._spans)
            del self._streams[request_id]

    async def _check(self, params: SamplingParams) -> CheckedParams:
        if params.structured_outputs is None:
            return self._reader.check(params)
        # Checking a schema takes some time, the first one most: it imports a library.
        return await asyncio.to_thread(self._reader.check, params)

    async def _read(
        self, prompt: Prompt, tokenization: Tokenization, *, gives_tokens: bool = True
    ) -> PromptInput:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        read = partial(
            self._reader.read,
            prompt,
            "prompt",
            gives_tokens=gives_tokens,
            tokenization=tokenization,
        )
        size = len(text) if isinstance(text, str) else 0
        return await self._reader.encoder.off_loop_if_long(read, size)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Abort requests. Their last outputs have the `finish_reason` `abort`."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            if (stream := self._streams.get(each)) is not None:
                stream.abort()

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ValueError if the model folder has none."""
        return Tokenizer(self._reader.tokenizer())

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of the model's generation_config.json, and 16 tokens if it sets no limit."""
        return self._reader.default_params()

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics, with the names on /metrics; they can be a second old. Empty before
        the first."""
        return [] if self._stats is None else metrics_of(self._stats)

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False if a request or transfer holds blocks."""
        await self._connect()
        answer = self._processes.send_command(ResetCache("prefix"))
        while not answer.done():
            self._check_death()
            await asyncio.sleep(COMMAND_POLL_S)
        return answer.result().ok

    async def check_health(self) -> None:
        """Raises EngineDead if the engine has died or was shut down."""
        await self._connect()
        self._check_death()

    async def _connect(self) -> EngineClient:
        """The connection to the engine, made by the first request. Raises EngineDead."""
        if not self._finalizer.alive:
            raise EngineDead("this AsyncLLM has been shut down")
        loop = asyncio.get_running_loop()
        if self._client is None:
            self._loop = loop
            self._client = EngineClient(
                self._processes.endpoint,
                ClientHello(
                    name="AsyncLLM", model_fingerprint=self._plan.identity.model_fingerprint
                ),
                seeds=self._seeds,
                on_stats=self._take_stats,
                why_stopped=self._processes.find_death,
            )
            self._watch = loop.create_task(self._watch_processes(self._client))
        elif self._loop is not loop:
            raise RuntimeError("this AsyncLLM belongs to the event loop of its first request")
        await self._client.wait_until_ready()
        return self._client

    def _take_stats(self, stats: SchedulerStats) -> None:
        self._stats = stats

    async def _watch_processes(self, client: EngineClient) -> None:
        """A worker that hangs does not end the connection."""
        while (death := self._processes.find_death()) is None:
            await asyncio.sleep(DEATH_CHECK_S)
        client.shut_down(f"the engine has stopped: {death}")

    def _check_death(self) -> None:
        client, death = self._client, self._processes.find_death()
        if client is not None and death is not None:
            client.shut_down(f"the engine has stopped: {death}")
        if client is not None and client.death is not None:
            raise client.death

    def shutdown(self) -> None:
        """Stop the engine and remove its processes and files. Live requests raise EngineDead. May
        be called twice."""
        client, self._client = self._client, None
        if self._watch is not None and self._loop is not None and not self._loop.is_closed():
            self._watch.cancel()
        if client is not None:
            if client.num_live_requests:
                client.shut_down("this AsyncLLM has been shut down")
            client.close()
        self._finalizer()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()


class _Stream:
    """The outputs of one request."""

    def __init__(self, request_id: str, kind: RequestOutputKind) -> None:
        self._request_id = request_id
        self._kind = kind
        self._changed = asyncio.Event()
        self._is_aborted = False
        self._client: EngineClient | None = None
        self._answers: list[Answer] = []
        self._shown: list[_Shown] = []

    def begin(self, client: EngineClient, answers: list[Answer]) -> None:
        """Submit the answers. Raises EngineDead."""
        self._client, self._answers = client, answers
        self._shown = [_Shown() for _ in answers]
        if self._is_aborted:
            return
        for answer in answers:
            answer.submit(client, self._changed.set)

    def abort(self) -> None:
        """Abort the answers that are not complete."""
        self._is_aborted = True
        live = [answer.live for answer in self._answers if answer.live is not None]
        if self._client is not None:
            self._client.abort(live)
        self._changed.set()

    def make_spans(self, spans: "RequestSpans") -> None:
        for answer in self._answers:
            answer.make_spans(spans)

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Raises EngineDead."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            for answer in self._answers:
                self._absorb(answer)
            output = self._output()
            if output.finished or (
                self._kind is not RequestOutputKind.FINAL_ONLY and output.outputs
            ):
                yield output
            if output.finished:
                return

    def _absorb(self, answer: Answer) -> None:
        live, client = answer.live, self._client
        if live is None or client is None:
            return
        answer.note_change()
        num_kept = answer.absorb()
        if num_kept is not None:
            client.stop(live, num_kept)
        if live.failure is not None and not (answer.is_stopped or self._is_aborted):
            raise live.failure

    def _output(self) -> RequestOutput:
        """All answers, or what is new in them."""
        output = request_output(self._request_id, self._answers)
        for each in output.outputs:
            if self._is_aborted and each.finish_reason is None:
                each.finish_reason = FinishReason.ABORTED.api_name
        output.finished = all(each.finished() for each in output.outputs)
        if self._kind is RequestOutputKind.DELTA:
            shown = zip(self._shown, output.outputs, strict=True)
            output.outputs = [new for seen, each in shown if (new := seen.take(each)) is not None]
        elif self._kind is RequestOutputKind.CUMULATIVE:
            output.outputs = [_copied(each) for each in output.outputs]
        return output


@dataclasses.dataclass
class _Shown:
    """How much of an answer the outputs of its stream have had."""

    num_characters: int = 0
    num_tokens: int = 0
    is_finished: bool = False

    def take(self, output: CompletionOutput) -> CompletionOutput | None:
        """What is new in the answer; None if nothing is."""
        if self.is_finished or (len(output.token_ids) == self.num_tokens and not output.finished()):
            return None
        new = dataclasses.replace(
            output,
            text=output.text[self.num_characters :],
            token_ids=output.token_ids[self.num_tokens :],
            logprobs=output.logprobs and output.logprobs[self.num_tokens :],
        )
        self.num_characters, self.num_tokens = len(output.text), len(output.token_ids)
        self.is_finished = output.finished()
        return new


def _copied(output: CompletionOutput) -> CompletionOutput:
    """The lists of an answer that still grows must not grow in the hands of a user."""
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return dataclasses.replace(output, token_ids=list(output.token_ids), logprobs=logprobs)
