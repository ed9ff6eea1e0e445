"""Prompts of a cross-encoder: a query and a document in one prompt.

The folder's tokenizer joins the two texts as transformers does (`tokenizer(query, document)`). With
`--chat-template`, the template gets them as messages of the roles `query` and `document`, as in
vLLM. A folder's own template is not used, because many rerankers inherit that of a chat model.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from longshore.deploy.gateway.api.endpoint import Service
from longshore.deploy.gateway.api.prompts import within_limit
from longshore.deploy.gateway.api.requests import TokenIds
from longshore.deploy.gateway.text.chat_template import ChatTemplate, TemplateRejected
from longshore.deploy.gateway.text.tokenizer import MAX_INLINE_TEXTS
from longshore.deploy.requests.errors import invalid
from longshore.deploy.requests.prompts import (
    PromptCut,
    PromptEncoder,
    PromptForm,
    Text,
    name_of_pair,
    parameter_of,
)

T = TypeVar("T")


class PairPrompts:
    """Makes the prompts of one endpoint. Large requests, and all with a template, are prepared on a
    thread, one at a time, so that streams do not wait for them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pairs")
        self._template: ChatTemplate | None = None  # of the thread

    async def token_ids(
        self, pairs: Sequence[tuple[Text, Text]], service: Service, cut: PromptCut | None
    ) -> list[TokenIds]:
        """Valid token ids of each pair. Raises RequestError."""
        tokenizer = service.prompts.tokenizer_for(parameter_of(pairs[0][1].name))

        def name_of(index: int) -> str:
            return pairs[index][1].name

        if service.has_score_template:
            if cut is not None:
                raise invalid(
                    "truncate_prompt_tokens would cut the end of the template; use "
                    "max_tokens_per_doc",
                    param="truncate_prompt_tokens",
                )

            def render_all() -> list[TokenIds]:
                template = self._template = self._template or tokenizer.chat_template.twin()
                return within_limit(_rendered(pairs, service.prompts, template), name_of)

            return await self._on_thread(render_all)

        def join_all() -> list[TokenIds]:
            return within_limit(service.prompts.pairs(pairs, cut), name_of)

        size = sum(len(query.text) + len(document.text) for query, document in pairs)
        if size > tokenizer.max_inline_characters or len(pairs) > MAX_INLINE_TEXTS:
            return await self._on_thread(join_all)
        return join_all()

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _rendered(
    pairs: Sequence[tuple[Text, Text]], prompts: PromptEncoder, template: ChatTemplate
) -> Iterator[TokenIds]:
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
        form = PromptForm(gives_tokens=False)
        yield prompts.token_ids(text, form, name_of_pair(query, document))
