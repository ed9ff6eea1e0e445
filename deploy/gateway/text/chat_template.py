"""Chat messages to a prompt, by the Jinja template that a model folder ships.

Templates come from model folders, so they run in a sandbox: no attribute access beyond data, no
change to what they are given, no more work than a budget allows.
The globals are those that Hugging Face documents for templates.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser

from longshore.deploy.gateway.text.template_bounds import BoundedEnvironment
from longshore.protocol.errors import ConfigError

PLAIN_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For models without a template of their own: `role: content`, a line each, then `assistant:`.
As in every template, the special token that the model's text begins with is written here."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant said, for training; what it encloses is kept."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefused(Exception):
    """The template does not accept these messages (for example two user turns in a row)."""


class ChatTemplate:
    """One compiled template with the model's special tokens, for one thread at a time. Raises
    ConfigError if it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._environment = environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.template(source)
        except (TemplateError, SyntaxError) as error:
            raise ConfigError(
                f"the chat template does not compile: {error}. Fix it, or give another one with "
                "--chat-template FILE."
            ) from error
        self._source = source
        self._special_tokens = dict(special_tokens)

    def twin(self) -> "ChatTemplate":
        """The same for another thread."""
        return ChatTemplate(self._source, self._special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = {},
    ) -> str:
        """The prompt's text; with `add_generation_prompt` it ends where the assistant's answer
        begins. variables: for the template, over its special tokens.

        Raises TemplateRefused with the template's own words if it rejects the messages.
        """
        try:
            self._environment.begin((messages, variables))
            return self._template.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": None,
                    "documents": None,
                }
            )
        # A template is a program that came with the model; it may fail in any way.
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise TemplateRefused(str(error)) from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own `tojson` escapes for HTML, which no model was trained on."""
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
