"""POST /v1/completions."""

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from longshore.deploy.gateway.api.endpoint import GenerationEndpoint, ResponseWriter, Service
from longshore.deploy.gateway.api.logprobs import CompletionLogprobs, LogprobsWriter
from longshore.deploy.gateway.api.prompts import value_or
from longshore.deploy.gateway.api.requests import MAX_PROMPTS
from longshore.deploy.gateway.api.structured_output import read_constraint
from longshore.deploy.gateway.api.thinking import with_budget
from longshore.deploy.gateway.api.usage import Usage
from longshore.deploy.gateway.openai.continuous_usage import UsageSoFar
from longshore.deploy.gateway.openai.requests import CompletionRequest
from longshore.deploy.gateway.openai.responses import CompletionChoice, CompletionResponse
from longshore.deploy.gateway.openai.routed_experts import encoded
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.model.folder import SamplingDefaults
from longshore.deploy.requests.beam_search import BeamSearchParams
from longshore.deploy.requests.errors import invalid
from longshore.deploy.requests.generation_spec import AnsweredPrompt, GenerationSpec, Piece
from longshore.deploy.requests.token_scores import TokenScore
from longshore.protocol.requests import RequestOptions

DEFAULT_COMPLETION_TOKENS: Final = 16


class CompletionsEndpoint(GenerationEndpoint[CompletionRequest]):
    """`n` answers per prompt, as choices, ordered by prompt."""

    path = "/v1/completions"
    id_prefix = "cmpl"
    request_type = CompletionRequest

    async def specify(
        self, service: Service, request: CompletionRequest, request_id: str, arrived_s: float
    ) -> GenerationSpec:
        request.check_beams()
        num_samples = request.num_samples
        prompt_logprobs = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
        sampling = service.prompts.sampling(
            request,
            completion_max_tokens(request, service.prompts.defaults),
            logprobs=request.logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        if request.suffix:
            _check_infilling(request)
        prompts = await service.prompts.prompts(
            request.prompts(),
            request,
            max_output_tokens=completion_max_tokens(request, service.prompts.defaults),
            suffix=request.suffix or "",
        )
        if len(prompts) * num_samples > MAX_PROMPTS:
            raise invalid(
                f"n={num_samples} with {len(prompts)} prompts makes too many answers; at most "
                f"{MAX_PROMPTS} are allowed",
                param="n",
            )
        texts = [given if isinstance(given, str) else "" for given in request.prompts()]
        num_ids = sum(map(len, prompts)) * num_samples if request.return_token_ids else 0
        return GenerationSpec(
            request_id=request_id,
            prompts=prompts,
            sampling=with_budget(sampling, request, service),
            is_stream=bool(request.stream),
            arrived_s=arrived_s,
            num_samples=num_samples,
            scores_only=request.scores_only,
            stops=service.prompts.stops(request),
            options=RequestOptions(
                structured_output=await read_constraint(
                    request.constraint(), service.json, ignores_end=request.ignore_eos
                )
            ),
            beams=self._beams(service, request, max(map(len, prompts))),
            num_echoed_characters=sum(map(len, texts)) if request.echo else 0,
            num_returned_prompt_ids=num_ids,
        )

    def _beams(
        self, service: Service, request: CompletionRequest, num_prompt_tokens: int
    ) -> BeamSearchParams | None:
        if not request.use_beam_search:
            return None
        width = request.num_samples if request.best_of is None else request.best_of
        if width < request.num_samples:
            raise invalid(
                f"best_of={width} must be at least n={request.num_samples}",
                param="best_of",
            )
        prompts = service.prompts
        ends = frozenset() if request.ignore_eos else frozenset(prompts.eos_token_ids)
        try:
            return BeamSearchParams(
                beam_width=width,
                max_tokens=min(
                    completion_max_tokens(request, prompts.defaults),
                    prompts.max_model_len - num_prompt_tokens,
                ),
                length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
                early_stopping=request.early_stopping or False,
                end_token_ids=ends | frozenset(request.stop_token_ids or ()),
            )
        except ValueError as error:
            names = {"beam_width": "n" if request.best_of is None else "best_of"}
            name = str(error).partition("=")[0]
            raise invalid(str(error), param=names.get(name, name)) from error

    def writer(
        self, service: Service, request: CompletionRequest, spec: GenerationSpec
    ) -> "CompletionWriter":
        with_token_ids = request.return_token_ids
        if with_token_ids is None:  # without a tokenizer, answers have no text
            with_token_ids = service.tokenizer is None
        return CompletionWriter(
            request,
            spec.request_id,
            service.model_name,
            service.tokenizer,
            with_token_ids=with_token_ids,
        )


class CompletionWriter(ResponseWriter):
    """Writes the bodies of text completions."""

    def __init__(
        self,
        request: CompletionRequest,
        request_id: str,
        model_name: str,
        tokenizer: ModelTokenizer | None,
        *,
        with_token_ids: bool,
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._logprobs = LogprobsWriter(None if request.return_tokens_as_token_ids else tokenizer)
        self._usage_so_far = UsageSoFar() if request.includes_continuous_usage else None
        self._offsets: dict[int, int] = {}  # text offset of the next token, by choice
        self._frame = CompletionResponse(
            id=request_id,
            created=int(time.time()),
            model=model_name,
            choices=(),
            usage=None if request.include_usage else msgspec.UNSET,
        )
        self._with_token_ids = with_token_ids

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        return ()

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        if self._usage_so_far is not None:
            usage = self._usage_so_far.after(piece)
            self._frame = msgspec.structs.replace(self._frame, usage=usage)
        choice = self._choice(piece)
        says_nothing = not choice.text and choice.finish_reason is None and not choice.logprobs
        if says_nothing and not self._with_token_ids:
            return ()
        return (self._filled(choice),)

    def last_chunks(self, usage: Usage) -> Sequence[msgspec.Struct]:
        return [msgspec.structs.replace(self._frame, usage=usage)]

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        params = pieces[0].kv_transfer_params
        return msgspec.structs.replace(
            self._filled(*map(self._choice, pieces)),
            usage=usage,
            kv_transfer_params=msgspec.UNSET if params is None else params,
        )

    def _choice(self, piece: Piece) -> CompletionChoice:
        text = piece.text
        if self._request.echo and piece.prompt is not None:
            text = self._prompt_text(piece.prompt) + text
        choice = CompletionChoice(
            piece.index,
            text,
            piece.finish_reason,
            logprobs=self._choice_logprobs(piece),
            token_ids=piece.token_ids if self._with_token_ids else msgspec.UNSET,
            routed_experts=encoded(piece.routed_experts),
        )
        wanted, prompt = self._request.prompt_logprobs, piece.prompt
        if self._request.return_token_ids and prompt is not None:
            choice = msgspec.structs.replace(choice, prompt_token_ids=prompt.token_ids)
        if wanted is None or prompt is None or prompt.scores is None:
            return choice
        by_token = self._logprobs.prompt(prompt.scores, wanted)
        return msgspec.structs.replace(choice, prompt_logprobs=by_token)

    def _prompt_text(self, prompt: AnsweredPrompt) -> str:
        given = self._request.prompts()[prompt.number]
        is_cut = self._request.truncate_prompt_tokens is not None
        if isinstance(given, str) and not is_cut:
            return given
        if self._tokenizer is None:
            return ""
        token_ids = list(prompt.token_ids)
        if isinstance(given, str):  # the tokenizer has added special tokens
            special = self._tokenizer.special_token_ids
            token_ids = [token_id for token_id in token_ids if token_id not in special]
        return self._tokenizer.decode(token_ids)

    def _choice_logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        num_best, prompt = self._request.logprobs, piece.prompt
        if num_best is None:
            return None
        scores: list[TokenScore | int] = list(piece.scores)
        if self._request.echo and prompt is not None and prompt.scores is not None:
            known = [each for each in prompt.scores if each is not None]
            scores = [prompt.token_ids[0], *known, *scores]
        offset = self._offsets.get(piece.index, 0)
        lines = self._logprobs.completion(scores, num_best, offset)
        self._offsets[piece.index] = offset + sum(map(len, lines.tokens))
        return lines

    def _filled(self, *choices: CompletionChoice) -> CompletionResponse:
        return msgspec.structs.replace(self._frame, choices=choices)


def completion_max_tokens(request: CompletionRequest, defaults: SamplingDefaults) -> int:
    """The requested number, else the model's default, else the API's. At least one, because the
    engine always computes a token."""
    if request.scores_only:
        return 1
    return value_or(request.max_tokens, value_or(defaults.max_tokens, DEFAULT_COMPLETION_TOKENS))


def _check_infilling(request: CompletionRequest) -> None:
    """Raise RequestError if the request does not allow a suffix."""
    if not all(isinstance(prompt, str) for prompt in request.prompts()):
        raise invalid("suffix needs prompts as text, not as token ids", param="suffix")
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise invalid(f"{name} is not supported with suffix; remove it", param=name)
