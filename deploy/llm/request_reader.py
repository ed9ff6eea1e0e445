"""Turns prompts, chats and sampling settings into answers that can be submitted, for one model."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from longshore.deploy.gateway.text.answer_text import StopStrings
from longshore.deploy.gateway.text.chat_template import ChatTemplate
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.llm.answer import Answer
from longshore.deploy.llm.chats import (
    ChatParameters,
    Message,
    as_chats,
    other_template,
    rendered_chat,
)
from longshore.deploy.llm.prompts import (
    CachedPrompt,
    Prompt,
    PromptInput,
    as_prompts,
    cache_options_of,
    given_prompt,
    value_errors,
)
from longshore.deploy.llm.sampling_params import SamplingParams
from longshore.deploy.llm.tokenization import AS_USUAL, Tokenization
from longshore.deploy.llm.transcriber import SpeechRequest
from longshore.deploy.model.folder import ModelFolder
from longshore.deploy.parsers.registry import AUTO, load_reasoning_parser
from longshore.deploy.requests.chat_prompt import NEXT_TURN, turn_ends
from longshore.deploy.requests.live_requests import MAX_JOB_ID_CHARACTERS
from longshore.deploy.requests.prompts import PromptEncoder, Text
from longshore.deploy.requests.sample_params import sample_params
from longshore.deploy.requests.thinking import reasoning_before
from longshore.deploy.requests.validation import sampling_problem
from longshore.protocol.requests import RequestOptions, StructuredOutput
from longshore.protocol.sampling import SamplingParams as EngineSamplingParams

DEFAULT_MAX_TOKENS: Final = 16


@dataclass(frozen=True)
class CheckedParams:
    """Settings of a prompt, and for the engine those of one answer to it and its constraint."""

    settings: SamplingParams
    engine_params: EngineSamplingParams
    constraint: StructuredOutput | None
    stops: StopStrings


class RequestReader:
    """All methods raise ValueError for what is invalid.

    tokenizer: None: prompts must be token ids.
    decoder:   decodes answers; None: they have no text.
    keeps_states: chats need `turn_ends`.
    """

    def __init__(
        self,
        model: ModelFolder,
        tokenizer: ModelTokenizer | None,
        decoder: TokenDecoder | None,
        *,
        max_model_len: int,
        keeps_states: bool = False,
    ) -> None:
        self._model = model
        self._keeps_states = keeps_states
        self.encoder = PromptEncoder(
            tokenizer, vocab_size=model.vocab_size, max_model_len=max_model_len
        )
        self.decoder = decoder

    def tokenizer(self) -> ModelTokenizer:
        """Raises ValueError if the model folder has none."""
        if self.encoder.tokenizer is None:
            raise ValueError(f"{self._model.path} has no tokenizer")
        return self.encoder.tokenizer

    def read(
        self,
        prompt: Prompt,
        name: str,
        *,
        gives_tokens: bool = True,
        tokenization: Tokenization = AS_USUAL,
    ) -> PromptInput:
        """name: of the prompt in errors. gives_tokens: at least one output token must fit after
        it."""
        with value_errors("tokenization_kwargs"):
            form = self.encoder.form(tokenization, gives_tokens=gives_tokens)
        content, text, options = given_prompt(prompt, name)
        if isinstance(content, str):
            content.encode()  # raises ValueError for a lone surrogate
        with value_errors():
            return PromptInput(self.encoder.token_ids(content, form, name), text, options)

    def read_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        gives_tokens: bool = True,
        tokenization: Tokenization = AS_USUAL,
    ) -> list[PromptInput]:
        """One or more prompts; see `read`."""
        return [
            self.read(
                prompt, f"prompts[{index}]", gives_tokens=gives_tokens, tokenization=tokenization
            )
            for index, prompt in enumerate(as_prompts(prompts))
        ]

    def read_chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        parameters: ChatParameters,
        *,
        chat_template: str | None = None,
        tokenization: Tokenization = AS_USUAL,
        cache: CachedPrompt | Sequence[CachedPrompt | None] | None = None,
    ) -> list[PromptInput]:
        """The prompts of one or more chats. cache: of all, or of each."""
        with value_errors("tokenization_kwargs"):
            form = self.encoder.form(tokenization, is_rendered=True)
        with value_errors():
            template = self.encoder.tokenizer_for("messages").chat_template
        if chat_template is not None:
            template = other_template(chat_template, template)
        parser = load_reasoning_parser(AUTO, template.source)
        chats = as_chats(messages)
        caches = [cache] * len(chats) if isinstance(cache, Mapping | None) else cache
        if len(caches) != len(chats):
            raise ValueError(f"{len(caches)} cache settings for {len(chats)} chats")
        prompts = []
        for index, (chat, kept) in enumerate(zip(chats, caches, strict=True)):
            name = f"messages[{index}]"
            text = rendered_chat(template, chat, parameters, name)
            for key in sorted((kept or {}).keys() - CachedPrompt.__annotations__):
                raise ValueError(f"{name}: {key} is no key of CachedPrompt")
            with value_errors():
                ids = self.encoder.token_ids(text, form, name)
            reasoning = reasoning_before(
                parser, self.encoder.tokenizer, ids, vocab_size=self._model.vocab_size
            )
            options = cache_options_of(kept or {}, name)
            if self._keeps_states:
                ends = self._turn_ends(template, chat, parameters, text, len(ids))
                options = msgspec.structs.replace(options, turn_ends=ends)
            prompts.append(PromptInput(ids, text, options, reasoning))
        return prompts

    def _turn_ends(
        self,
        template: ChatTemplate,
        chat: Sequence[Message],
        parameters: ChatParameters,
        text: str,
        num_tokens: int,
    ) -> tuple[int, ...]:
        if parameters.continue_final_message:
            return ()
        unanswered = dataclasses.replace(parameters, add_generation_prompt=False)
        others = []
        for messages, form in (
            ([*chat, *map(msgspec.to_builtins, NEXT_TURN)], parameters),
            (chat, unanswered),
        ):
            with suppress(ValueError):  # of a template that demands roles in turn
                others.append(rendered_chat(template, messages, form, "messages"))
        return turn_ends(text, num_tokens, others, self.tokenizer())

    def read_pairs(
        self, pairs: Sequence[tuple[Text, Text]], tokenization: Tokenization = AS_USUAL
    ) -> list[PromptInput]:
        """A prompt of each pair of texts, for models that classify pairs. The second text is
        truncated."""
        if tokenization.add_special_tokens is False:
            raise ValueError(
                "tokenization_kwargs: add_special_tokens=False is not supported for pairs; they "
                "separate the two texts"
            )
        with value_errors("tokenization_kwargs"):
            cut = self.encoder.cut(tokenization, gives_tokens=False)
        with value_errors():
            return [PromptInput(ids) for ids in self.encoder.pairs(pairs, cut)]

    def default_params(self) -> SamplingParams:
        """The defaults of the model's generation_config.json, and 16 tokens if it sets no limit."""
        defaults = self._model.sampling_defaults
        return SamplingParams(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            max_tokens=DEFAULT_MAX_TOKENS if defaults.max_tokens is None else defaults.max_tokens,
        )

    def check_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[CheckedParams]:
        """The settings for each prompt."""
        if params is None:
            params = self.default_params()
        if isinstance(params, SamplingParams):
            return [self.check(params)] * num_prompts
        if len(params) != num_prompts:
            raise ValueError(
                f"{len(params)} sampling_params for {num_prompts} prompts; pass one per prompt, or "
                "one for all"
            )
        return [self.check(each) for each in params]

    def check(self, params: SamplingParams) -> CheckedParams:
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling_params must be longshore.SamplingParams, not a {type(params).__name__}"
            )
        engine_params = params.engine_params(self.encoder.tokenizer)
        problem = sampling_problem(engine_params, vocab_size=self._model.vocab_size)
        if problem is not None:
            raise ValueError(problem)
        stops, constraint = params.stops(), params.constraint()
        needed = {"stop": stops.texts, "structured_outputs": constraint}
        with value_errors():
            for name, given in needed.items():
                if given:
                    self.encoder.tokenizer_for(name)
        return CheckedParams(params, engine_params, constraint, stops)

    def answers(
        self,
        request_id: str,
        prompt: PromptInput,
        params: CheckedParams,
        *,
        priority: int = 0,
        job_id: str | None = None,
        is_last_step: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> list[Answer]:
        """The answers to one prompt."""
        if job_id is not None and not 1 <= len(job_id) <= MAX_JOB_ID_CHARACTERS:
            raise ValueError(f"job_id must have 1 to {MAX_JOB_ID_CHARACTERS} characters")
        if job_id is None and is_last_step:
            raise ValueError("is_last_step needs job_id")
        settings, constraint = params.settings, params.constraint
        if constraint is not None:
            constraint = msgspec.structs.replace(constraint, free=prompt.reasoning)
        options = msgspec.structs.replace(
            prompt.options,
            structured_output=constraint,
            skip_reading_prefix_cache=bool(settings.skip_reading_prefix_cache),
            priority=priority,
            job_id=job_id,
            is_last_step=is_last_step,
            trace_headers=None if trace_headers is None else dict(trace_headers),
        )
        answers: list[Answer] = []
        for index, sampling in enumerate(sample_params(params.engine_params, settings.n)):
            answer = Answer(
                request_id if settings.n == 1 else f"{request_id}-{index}",
                prompt,
                sampling,
                self.decoder if settings.detokenize else None,
                params.stops,
                index=index,
                num_choices=settings.n,
                first=answers[0] if answers else None,
                shows_special=not settings.skip_special_tokens,
                options=options,
            )
            answers.append(answer)
        return answers

    def speech_answer(self, request_id: str, request: SpeechRequest) -> Answer:
        """The answer to one piece of an audio input."""
        return Answer(
            request_id,
            PromptInput(request.prompt_token_ids),
            request.sampling,
            self.decoder,
            options=RequestOptions(multimodal=(request.feature,)),
            num_primed=request.num_primed,
        )


def check_no_lora(lora_request: object) -> None:
    """Raise ValueError for an adapter."""
    if lora_request is not None:
        raise ValueError("lora_request is not supported: merge the adapter into the weights")
