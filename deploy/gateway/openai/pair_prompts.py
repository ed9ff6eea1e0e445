"""Prompts of a cross-encoder: a query and a document in one prompt.

The folder's tokenizer joins the two texts as transformers does (`tokenizer(query, document)`). With
`--chat-template`, the template gets them as messages of the roles `query` and `document`, as in
vLLM. A folder's own template is not used, because many rerankers inherit that of a chat model.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from tokenizers import Encoding

from longshore.deploy.gateway.openai.endpoint import Service
from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.openai.pooled_inputs import (
    check_input,
    check_total,
    parameter_of,
)
from longshore.deploy.gateway.openai.requests import TokenIds
from longshore.deploy.gateway.text.chat_template import ChatTemplate, TemplateRejected
from longshore.deploy.gateway.text.tokenizer import MAX_INLINE_TEXTS, ModelTokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class Text:
    """One text of a pair. name: its parameter, with its index in brackets if it has one."""

    text: str
    name: str


class PairPrompts:
    """Makes the prompts of one endpoint. Large requests, and all with a template, are prepared on a
    thread, one at a time, so that streams do not wait for them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pairs")
        self._template: ChatTemplate | None = None  # of the thread

    async def token_ids(
        self,
        pairs: Sequence[tuple[Text, Text]],
        service: Service,
        tokenizer: ModelTokenizer,
        *,
        max_tokens: int | None,
        keeps_end: bool | None,
    ) -> list[TokenIds]:
        """Valid token ids of each pair. Raises ApiError.

        max_tokens, keeps_end: documents of longer pairs are truncated (`ModelTokenizer.part`).
        """
        if service.has_score_template:
            if max_tokens is not None:
                raise invalid(
                    "truncate_prompt_tokens would cut the end of the template; use "
                    "max_tokens_per_doc",
                    param="truncate_prompt_tokens",
                )

            def render_all() -> list[TokenIds]:
                template = self._template = self._template or tokenizer.chat_template.twin()
                return _rendered(pairs, service, tokenizer, template)

            return await self._on_thread(render_all)

        def join_all() -> list[TokenIds]:
            return _joined(pairs, service, tokenizer, max_tokens, keeps_end)

        size = sum(len(query.text) + len(document.text) for query, document in pairs)
        if size > tokenizer.max_inline_characters or len(pairs) > MAX_INLINE_TEXTS:
            return await self._on_thread(join_all)
        return join_all()

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _joined(
    pairs: Sequence[tuple[Text, Text]],
    service: Service,
    tokenizer: ModelTokenizer,
    max_tokens: int | None,
    keeps_end: bool | None,
) -> list[TokenIds]:
    prompts: list[TokenIds] = []
    num_tokens = 0
    last: Text | None = None
    first = Encoding()
    for query, document in pairs:
        if query is not last:
            service.prompts.reject_too_long(query.text, tokenizer, parameter_of(query.name))
            first, last = tokenizer.part(query.text), query
        room = None
        if max_tokens is None:
            service.prompts.reject_too_long(document.text, tokenizer, parameter_of(document.name))
        else:
            room = max_tokens - len(first) - tokenizer.num_pair_tokens
            if room < 1:
                raise invalid(
                    f"{query.name} has {len(first)} tokens, which leaves none of {max_tokens} for "
                    "a document; shorten it",
                    param=parameter_of(query.name),
                    code="context_length_exceeded",
                )
        ids = tokenizer.join(first, tokenizer.part(document.text, room, keeps_end=keeps_end))
        num_tokens += len(ids)
        _check(ids, document, num_tokens, service)
        prompts.append(ids)
    return prompts


def _rendered(
    pairs: Sequence[tuple[Text, Text]],
    service: Service,
    tokenizer: ModelTokenizer,
    template: ChatTemplate,
) -> list[TokenIds]:
    prompts: list[TokenIds] = []
    num_tokens = 0
    for query, document in pairs:
        messages = [
            {"role": "query", "content": query.text},
            {"role": "document", "content": document.text},
        ]
        try:
            text = template.render(messages, add_generation_prompt=False)
        except TemplateRejected as error:
            raise invalid(
                f"the template (--chat-template) rejects {document.name}: {error}",
                param=parameter_of(document.name),
            ) from error
        service.prompts.reject_too_long(text, tokenizer, parameter_of(document.name))
        ids = tokenizer.encode(text)
        num_tokens += len(ids)
        _check(ids, document, num_tokens, service)
        prompts.append(ids)
    return prompts


def _check(ids: TokenIds, document: Text, num_tokens: int, service: Service) -> None:
    longest = service.prompts.max_model_len
    if len(ids) > longest:
        raise invalid(
            f"{document.name} has {len(ids)} tokens with its query; the maximum for this model is "
            f"{longest}. Shorten them, or set max_tokens_per_doc",
            param=parameter_of(document.name),
            code="context_length_exceeded",
        )
    check_input(ids, document.name, service)
    check_total(num_tokens, document.name)
