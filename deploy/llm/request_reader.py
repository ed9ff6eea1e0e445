"""Turns prompts, chats and sampling settings into answers that can be submitted, for one model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from longshore.deploy.gateway.text.answer_text import AnswerText, StopStrings
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.llm.answer import Answer
from longshore.deploy.llm.chats import (
    Message,
    as_chats,
    chat_options,
    other_template,
    rendered_chat,
)
from longshore.deploy.llm.prompts import CachedPrompt, Prompt, PromptInput, PromptParser, as_prompts
from longshore.deploy.llm.sampling_params import SamplingParams
from longshore.deploy.llm.tokenization import AS_USUAL, Tokenization
from longshore.deploy.llm.transcriber import SpeechRequest
from longshore.deploy.model.folder import ModelFolder
from longshore.deploy.requests.live_requests import MAX_JOB_ID_CHARACTERS
from longshore.deploy.requests.sample_params import sample_params
from longshore.deploy.requests.validation import sampling_problem
from longshore.protocol.requests import StructuredOutput
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
    """

    def __init__(
        self,
        model: ModelFolder,
        tokenizer: ModelTokenizer | None,
        decoder: TokenDecoder | None,
        *,
        max_model_len: int,
    ) -> None:
        self._model = model
        self.tokenizer = tokenizer
        self.decoder = decoder
        self.parser = PromptParser(tokenizer, model.path, model.vocab_size, max_model_len)

    def read_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        gives_tokens: bool = True,
        tokenization: Tokenization = AS_USUAL,
    ) -> list[PromptInput]:
        """One or more prompts. gives_tokens: at least one output token must fit after each."""
        return [
            self.parser.parse(
                prompt,
                f"prompts[{index}]",
                gives_tokens=gives_tokens,
                tokenization=tokenization,
            )
            for index, prompt in enumerate(as_prompts(prompts))
        ]

    def read_chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        tokenization: Tokenization = AS_USUAL,
        cache: CachedPrompt | Sequence[CachedPrompt | None] | None = None,
    ) -> list[PromptInput]:
        """The prompts of one or more chats. cache: of all, or of each."""
        if self.tokenizer is None:
            raise ValueError(f"a chat needs a tokenizer, but {self._model.path} has none")
        options = chat_options(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
        )
        template = self.tokenizer.chat_template
        if chat_template is not None:
            template = other_template(chat_template, template)
        chats = as_chats(messages)
        caches = [cache] * len(chats) if isinstance(cache, Mapping | None) else cache
        if len(caches) != len(chats):
            raise ValueError(f"{len(caches)} cache settings for {len(chats)} chats")
        prompts = []
        for index, (chat, kept) in enumerate(zip(chats, caches, strict=True)):
            where = f"messages[{index}]"
            text = rendered_chat(template, chat, options, where)
            prompts.append(self.parser.parse_rendered(text, where, tokenization, kept))
        return prompts

    def read_pairs(
        self, pairs: Sequence[tuple[str, str]], tokenization: Tokenization = AS_USUAL
    ) -> list[PromptInput]:
        """A prompt of each pair of texts, for models that classify pairs. The second text is
        truncated."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError(f"a pair needs a tokenizer, but {self._model.path} has none")
        if tokenization.add_special_tokens is False:
            raise ValueError(
                "tokenization_kwargs: add_special_tokens=False is not supported for pairs; they "
                "separate the two texts"
            )
        cut = tokenization.cut(
            tokenizer, max_model_len=self.parser.max_model_len, gives_tokens=False
        )
        prompts = []
        for index, (one, other) in enumerate(pairs):
            first = tokenizer.part(one)
            if cut is None:
                second = tokenizer.part(other)
            else:
                room = cut.max_tokens - len(first) - tokenizer.num_pair_tokens
                if room < 1:
                    raise ValueError(
                        f"pair {index}: the first text has {len(first)} tokens, which leaves none "
                        f"of {cut.max_tokens} for the second; shorten it"
                    )
                second = tokenizer.part(other, room, keeps_end=cut.keeps_end)
            prompt = PromptInput(tokenizer.join(first, second))
            prompts.append(self.parser.checked(prompt, f"pair {index}", gives_tokens=False))
        return prompts

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
        engine_params = params.engine_params(self.tokenizer)
        problem = sampling_problem(engine_params, vocab_size=self._model.vocab_size)
        if problem is not None:
            raise ValueError(problem)
        stops = params.stops()
        if stops.texts and self.tokenizer is None:
            raise ValueError(f"stop needs a tokenizer, but {self._model.path} has none")
        constraint = params.constraint()
        if constraint is not None and self.tokenizer is None:
            raise ValueError(
                f"structured_outputs needs a tokenizer, but {self._model.path} has none"
            )
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
    ) -> list[Answer]:
        """The answers to one prompt."""
        if job_id is not None and not 1 <= len(job_id) <= MAX_JOB_ID_CHARACTERS:
            raise ValueError(f"job_id must have 1 to {MAX_JOB_ID_CHARACTERS} characters")
        if job_id is None and is_last_step:
            raise ValueError("is_last_step needs job_id")
        settings, stops = params.settings, params.stops
        shows_special = not settings.skip_special_tokens
        decoder = self.decoder if settings.detokenize else None
        answers: list[Answer] = []
        for index, sampling in enumerate(sample_params(params.engine_params, settings.n)):
            answer = Answer(
                request_id if settings.n == 1 else f"{request_id}-{index}",
                prompt,
                sampling,
                index,
                answers[0] if answers else None,
                decoder,
                None
                if decoder is None
                else AnswerText(decoder, prompt.token_ids, stops, shows_special=shows_special),
                has_stops=bool(stops.texts),
                shows_stop=stops.is_shown,
                structured_output=params.constraint,
                skips_reading=bool(settings.skip_reading_prefix_cache),
                priority=priority,
                job_id=job_id,
                is_last_step=is_last_step,
            )
            answers.append(answer)
        return answers

    def speech_answer(self, request_id: str, request: SpeechRequest) -> Answer:
        """The answer to one piece of an audio input."""
        ids = request.prompt_token_ids
        return Answer(
            request_id,
            PromptInput(ids),
            request.sampling,
            decoder=self.decoder,
            detokenizer=None if self.decoder is None else AnswerText(self.decoder, ids),
            multimodal=(request.feature,),
            num_primed=request.num_primed,
        )


def check_no_lora(lora_request: object) -> None:
    """Raise ValueError for an adapter."""
    if lora_request is not None:
        raise ValueError("lora_request is not supported: merge the adapter into the weights")
