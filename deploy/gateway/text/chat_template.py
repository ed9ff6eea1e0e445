"""Renders chat messages to a prompt with the Jinja template of a model folder.

Templates come from model folders, so they run in a sandbox: they cannot access attributes beyond
data, change their input, or exceed a budget of work. The globals are those that Hugging Face
documents for templates.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Const, Getattr, Name, Node, Template
from jinja2.parser import Parser

from longshore.deploy.gateway.text.template_bounds import BoundedEnvironment, TemplateTooCostly
from longshore.protocol.errors import ConfigError, shortened

MAX_TIME_PATTERN: Final = 256
MAX_TEMPLATE_CHARACTERS: Final = 256 << 10  # the largest of models have some 50,000
PLAIN_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For models without a template of their own: a line `role: content` per message, then
`assistant:`. As in every template, it includes the beginning-of-sequence token."""


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's text, for training. Rendering keeps its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRejected(Exception):
    """The template rejected these messages (for example two user turns in a row)."""


class ChatTemplate:
    """One compiled template with the model's special tokens, for one thread at a time. Raises
    ConfigError if it does not compile.

    source: its text.
    words: the variables, attributes and texts that it uses.
    variables: those that it does not set itself.
    tool_use: the template for chats with tools, if the model has one of its own for them.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, tool_use: str | None = None
    ) -> None:
        self._environment = environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ConfigError(
                f"the chat template has {len(source)} characters; the limit is "
                f"{MAX_TEMPLATE_CHARACTERS}. Set another one with --chat-template FILE."
            )
        try:
            self._template = environment.template(source)
            tree = environment.parse(source)
            self.words = _words(tree)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
        # It may be nested too deeply, have numbers that are too long, and so on.
        except Exception as error:
            reason = shortened(" ".join(str(error).split()) or type(error).__name__)
            raise ConfigError(
                f"the chat template does not compile: {reason}. Fix it, or set another one with "
                "--chat-template FILE."
            ) from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.tool_use = None if tool_use is None else ChatTemplate(tool_use, special_tokens)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The model's special tokens by name, such as `eos_token`."""
        return self._special_tokens

    def twin(self) -> "ChatTemplate":
        """A copy for another thread."""
        source = None if self.tool_use is None else self.tool_use.source
        return ChatTemplate(self.source, self._special_tokens, tool_use=source)

    def for_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> "ChatTemplate":
        """The template that renders a chat with these tools, or with none."""
        return self if tools is None or self.tool_use is None else self.tool_use

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = {},
        documents: Sequence[Mapping[str, Any]] | None = None,
        is_inline: bool = False,
    ) -> str:
        """The prompt's text; with `add_generation_prompt` it ends where the assistant's answer
        begins.

        tools:     definitions of functions, as in OpenAI's API.
        variables: additional variables; they override special tokens.
        documents: that the answer is about.
        is_inline: raise TemplateTooCostly if it takes too long for the event loop.

        Raises TemplateRejected with the template's message if it rejects the chat messages.
        """
        try:
            self._environment.begin((messages, variables, tools, documents), is_inline=is_inline)
            return self._template.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": tools,
                    "documents": documents,
                }
            )
        except TemplateTooCostly as error:
            if is_inline:
                raise
            raise TemplateRejected(str(error)) from error
        # A template is a program from the model folder and may fail in any way.
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise TemplateRejected(str(error)) from error


def _words(tree: Template) -> frozenset[str]:
    return frozenset(
        [name.name for name in tree.find_all(Name)]
        + [attribute.attr for attribute in tree.find_all(Getattr)]
        + [text.value for text in tree.find_all(Const) if isinstance(text.value, str)]
    )


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own `tojson` escapes for HTML, which models were not trained on."""
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_TIME_PATTERN:  # its fields may be as wide as they say
        raise TemplateError(f"strftime_now takes at most {MAX_TIME_PATTERN} characters")
    return datetime.now().strftime(pattern)
