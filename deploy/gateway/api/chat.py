"""Chats of all APIs: what is submitted to the engine, and how answers are parsed."""

from collections.abc import Sequence

import msgspec

from longshore.deploy.gateway.api.endpoint import GenerationEndpoint, Service
from longshore.deploy.gateway.api.prompts import chat_max_tokens
from longshore.deploy.gateway.api.requests import ChatRequest, TokenIds
from longshore.deploy.gateway.api.structured_output import read_constraint
from longshore.deploy.gateway.api.thinking import with_budget
from longshore.deploy.gateway.api.unknown_fields import ignore_fields
from longshore.deploy.gateway.http.json_body import MAX_INLINE_BYTES
from longshore.deploy.gateway.request_log import current
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.parsers.answer import AnswerParsers
from longshore.deploy.parsers.forced import ForcedCalls
from longshore.deploy.requests.chat_messages import template_input
from longshore.deploy.requests.chat_parsing import ChatParsing
from longshore.deploy.requests.chat_tools import tool_use
from longshore.deploy.requests.errors import invalid
from longshore.deploy.requests.free_calls import call_constraint
from longshore.deploy.requests.generation_spec import GenerationSpec
from longshore.deploy.requests.thinking import answer_marks, reasoning_before
from longshore.protocol.requests import RequestOptions, StructuredOutput


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    """Answers a chat. Other APIs than OpenAI's translate their requests to one."""

    request_type = ChatRequest

    async def prompt(self, service: Service, request: ChatRequest) -> TokenIds:
        """The token ids of the prompt. Raises RequestError."""
        return await service.prompts.chat_prompt(request)

    async def specify(
        self, service: Service, request: ChatRequest, request_id: str, arrived_s: float
    ) -> GenerationSpec:
        parsing = chat_parsing(service, request)
        prompt = await self.prompt(service, request)
        if (exchange := current()) is not None:
            service.uncached.observe(exchange.user_agent, exchange.key, prompt)
        sampling = service.prompts.sampling(
            request,
            chat_max_tokens(request, service.prompts.defaults),
            logprobs=request.num_logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )
        return GenerationSpec(
            request_id=request_id,
            prompts=[prompt],
            sampling=with_budget(sampling, request, service),
            is_stream=bool(request.stream),
            arrived_s=arrived_s,
            num_samples=request.num_samples,
            stops=service.prompts.stops(request),
            shown_special_token_ids=shown_special_token_ids(parsing, service.tokenizer),
            options=RequestOptions(
                structured_output=await _constraint(service, request, prompt),
                turn_ends=await service.prompts.turn_ends(request, prompt),
            ),
            num_echoed_characters=len(echoed_text(request)),
            num_returned_prompt_ids=len(prompt) if request.return_token_ids else 0,
        )


async def _constraint(
    service: Service, request: ChatRequest, prompt: Sequence[int]
) -> StructuredOutput | None:
    """The constraint of the answer, which holds after the reasoning, or of the calls in it. The
    response names what it cannot enforce. Raises RequestError."""
    parser = service.parsers.reasoning
    reasoning = reasoning_before(
        parser, service.tokenizer, prompt, vocab_size=service.prompts.vocab_size
    )
    asked = request.constraint(service.max_forced_calls)
    constraint = await read_constraint(asked, service.json, ignores_end=request.ignore_eos)
    if constraint is None:
        use = tool_use(request)
        if not use.may_call:
            return None
        tools = request.tools or ()
        # As in `read_constraint`.
        is_strict = any(tool.get("function", {}).get("strict") for tool in tools)
        calls, ignored = await service.json.run(
            MAX_INLINE_BYTES + 1 if is_strict else 0,
            call_constraint,
            tools,
            use,
            service.parsers.tools,
            service.tokenizer,
            vocab_size=service.prompts.vocab_size,
        )
        ignore_fields(ignored)
        if calls is None or (parser is not None and parser.answers):
            return calls
        free = reasoning
        if calls.free is not None:
            free = msgspec.structs.replace(calls.free, reasoning=reasoning)
        return msgspec.structs.replace(calls, free=free)
    return msgspec.structs.replace(constraint, free=reasoning)


def chat_parsing(service: Service, request: ChatRequest) -> ChatParsing | None:
    """How the answers are parsed; None: they are text. Raises RequestError."""
    use = tool_use(request)
    parsers = service.parsers
    max_calls = None if use.is_parallel else 1
    has_reasoning = request.include_reasoning is not False
    # Before what the constraint allows, if the constraint can begin to hold after it.
    reasoning = parsers.reasoning
    if not answer_marks(reasoning, service.tokenizer, vocab_size=service.prompts.vocab_size):
        reasoning = None
    if use.is_forced:
        is_text = use.forced_grammar is not None
        forced = ForcedCalls(use.forced_name, parsers.tools, is_text=is_text)
        return ChatParsing(
            AnswerParsers(reasoning, forced),
            use.names,
            max_calls,
            has_reasoning,
            names_call=use.forced_name is not None,
            custom_names=use.custom_names,
        )
    if use.may_call and parsers.tools is None:
        raise invalid(
            "tools: this server has no parser for the model's tool calls. Start it with "
            '--tool-call-parser NAME, or set tool_choice to "required" or "none".',
            param="tools",
            code="unsupported_parameter",
        )
    if request.constraint() is not None:
        parsing = ChatParsing(AnswerParsers(reasoning), has_reasoning=has_reasoning)
        return None if reasoning is None else parsing
    tools = parsers.tools if use.may_call else None
    if tools is None and parsers.reasoning is None:
        return None
    return ChatParsing(
        AnswerParsers(parsers.reasoning, tools),
        use.names,
        max_calls,
        has_reasoning,
        custom_names=use.custom_names,
        schemas=use.schemas,
    )


def shown_special_token_ids(
    parsing: ChatParsing | None, tokenizer: ModelTokenizer | None
) -> frozenset[int]:
    """The special tokens that the parsers have to see."""
    if parsing is None or tokenizer is None:
        return frozenset()
    added = tokenizer.added_tokens
    return frozenset(added[token] for token in parsing.parsers.special_tokens & added.keys())


def echoed_text(request: ChatRequest) -> str:
    """The text that answers begin with: that of the last message, if it is to be echoed."""
    if not request.echo:
        return ""
    (last,) = template_input(request.messages[-1:])
    opens_no_answer = request.add_generation_prompt is False or request.continue_final_message
    return str(last["content"] or "") if last["role"] == "assistant" or opens_no_answer else ""
