"""What calls follow that the model makes by itself: the schemas of strict functions, the grammars
of custom tools, and a choice of allowed tools."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.parsers.parser import CallForm, CallGrammar, NotExpressible, ToolParser
from longshore.deploy.requests.chat_tools import ToolUse, custom_tool, invalid_choice
from longshore.deploy.requests.errors import invalid
from longshore.deploy.requests.structured_outputs import (
    StructuredOutputError,
    check_schema,
    strict_arguments,
)
from longshore.protocol.requests import MAX_CONSTRAINT_BYTES, FreeText, StructuredOutput


def call_constraint(
    tools: Sequence[Mapping[str, Any]],
    use: ToolUse,
    parser: ToolParser | None,
    tokenizer: ModelTokenizer | None,
    *,
    vocab_size: int,
) -> tuple[StructuredOutput | None, list[str]]:
    """The constraint of the calls in an answer, from their marker on, and the fields of the request
    that it cannot enforce with this model. None: nothing has to be enforced. Raises
    RequestError."""
    forms, asked = {}, {}
    for position, tool in enumerate(tools):
        name, form, field = _form(tool, position)
        if name in use.names:
            forms[name] = form
            if field:
                asked[name] = field
    if not asked and not use.is_limited:
        return None, []
    grammars = _Grammars(parser, tokenizer, vocab_size)
    ignored = []
    for name, field in asked.items():
        try:
            if not grammars.has_grammar(name, forms[name]):
                ignored.append(field)
        except NotExpressible as error:
            if forms[name].syntax is None:
                raise invalid(f"{field}: {error}", param="tools") from error
            ignored.append(field)
            forms[name] = CallForm()
    grammar = None
    if use.is_limited or len(ignored) < len(asked):
        grammar = grammars.grammar(forms)
    if grammar is None:
        if use.is_limited:
            raise invalid_choice(
                "of the type allowed_tools needs a model whose calls begin with a token of their "
                "own; send only the allowed tools"
            )
        return None, ignored
    if len(grammar.text.encode()) > MAX_CONSTRAINT_BYTES:
        raise invalid(
            f"tools: the schemas of these functions have more than {MAX_CONSTRAINT_BYTES} bytes; "
            "send fewer tools, or without strict",
            param="tools",
        )
    free = None if grammar.is_answer else FreeText(grammars.marks(grammar), repeats=True)
    return StructuredOutput("tool_calls", grammar.text, free), ignored


def _form(tool: Mapping[str, Any], position: int) -> tuple[str, CallForm, str]:
    """The tool's name, what its calls follow, and the field that asks for it; empty: none does."""
    if tool["type"] == "custom":
        custom = custom_tool(tool)
        grammar = custom.format.grammar
        if grammar is None:
            return custom.name, CallForm(), ""
        form = CallForm(syntax=grammar.syntax, definition=grammar.definition)
        return custom.name, form, f"tools[{position}].format"
    function = tool["function"]
    if not function.get("strict"):
        return function["name"], CallForm(), ""
    form = CallForm(strict_arguments(function.get("parameters") or {}))
    try:
        check_schema(msgspec.json.encode(form.schema).decode())
    except StructuredOutputError as error:
        where = f"tools[{position}].function.parameters"
        raise invalid(f"{where}: {error}", param="tools") from error
    return function["name"], form, f"tools[{position}].strict"


class _Grammars:
    """The grammars of one model's format."""

    def __init__(
        self, parser: ToolParser | None, tokenizer: ModelTokenizer | None, vocab_size: int
    ) -> None:
        added = {} if tokenizer is None else tokenizer.added_tokens
        special = frozenset() if tokenizer is None else tokenizer.special_token_ids
        self._parser = parser
        self._tokenizer = tokenizer
        self._ids = {text: one for text, one in added.items() if one < vocab_size}
        self._special_ids = {
            text: self._ids[text]
            for text in (() if parser is None else parser.special_tokens)
            if self._ids.get(text) in special
        }

    def grammar(self, forms: Mapping[str, CallForm]) -> CallGrammar | None:
        """None: the format has none, or its marker is no token. Raises NotExpressible."""
        if self._parser is None:
            return None
        grammar = self._parser.call_grammar(forms, self._special_ids)
        if grammar is None or not (grammar.is_answer or self.marks(grammar)):
            return None
        return grammar

    def has_grammar(self, name: str, form: CallForm) -> bool:
        """Raises NotExpressible."""
        return self.grammar({name: form}) is not None

    def marks(self, grammar: CallGrammar) -> tuple[tuple[int, ...], ...]:
        """The tokens of what begins a call; empty: no tokens do so for certain."""
        tokenizer = self._tokenizer
        if tokenizer is None or not grammar.phrases:
            return ((self._ids[grammar.marker],),) if grammar.marker in self._ids else ()
        if not self._special_ids:  # those of its header
            return ()
        return tuple(tuple(tokenizer.encode_rendered(phrase)) for phrase in grammar.phrases)
