"""Reads the parameters of a request from its JSON body, within bounds.

A parameter is a field of the request, or listed as unsupported with its neutral values, or unknown.
An unsupported parameter that would change the answer is rejected by name, never ignored.

Decoding JSON holds the interpreter lock, and many small objects take a hundred times longer than a
text of the same size. So a body is first split into parameters, which stay bytes, and a parameter
is decoded only if the number of objects in it is known to be small.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from longshore.deploy.gateway.openai.errors import ApiError, invalid
from longshore.protocol.errors import shortened

MAX_PARAMETER_BYTES: Final = 64 << 10
"""Limit of each parameter's JSON, except prompts, tools, and parameters that are ignored."""
MAX_TOKEN_IDS: Final = 2 << 20
"""Limit of the token ids of all prompts of a request."""
MAX_ITEMS: Final = 2048
"""Limit of the texts, or lists of token ids, of a request."""
MAX_TOOLS_BYTES: Final = 1 << 20
"""Limit of the JSON of `tools`."""
MAX_OBJECTS: Final = 256 << 10
"""Limit of the messages of a chat and their parts, counted by the number of `{`."""

MAX_DOCUMENT_TEXTS: Final = 32 << 10
"""Limit of the texts in `documents` and their names, counted by the number of quotes."""

_PROMPTS: Final = frozenset(
    {"prompt", "input", "messages", "tokens", "system", "instructions"}
    | {"documents", "queries", "query", "items", "text_1", "text_2", "data_1", "data_2"}
)
MAX_NEUTRAL_BYTES: Final = 1024

# Accepted, without effect on the answer.
IGNORED: Final = frozenset(
    {
        "metadata",
        "safety_identifier",
        "user",
    }
)
# Not supported yet. The values here (and null) have no effect, so they are accepted.
UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

ParametersT = TypeVar("ParametersT", bound=msgspec.Struct)
JsonT = TypeVar("JsonT")

_FIELD_OF_ERROR: Final = re.compile(r"at `\$\.(\w+)|(?:required|unknown) field `(\w+)`")
_UNKNOWN_FIELD: Final = "Object contains unknown field `"
_FIRST_ITEM: Final = re.compile(rb"\[\s*(.)", re.DOTALL)


def read_parameters(
    kind: type[ParametersT],
    body: bytes,
    *,
    accepts_others: bool = True,
    ignored: frozenset[str] = IGNORED,
    unsupported: Mapping[str, tuple[object, ...]] = UNSUPPORTED,
) -> ParametersT:
    """`body` as `kind`, without ignored parameters. All items of a prompt are of one kind. Raises
    ApiError (400) naming the invalid parameter. Takes up to a quarter of a second for a body of
    16 MiB.

    accepts_others: accept parameters that have no effect: those in `ignored`, and those in
        `unsupported` with one of their neutral values.
    """
    fields = kind.__struct_fields__
    others = (*ignored, *unsupported) if accepts_others else ()
    try:
        given = msgspec.json.decode(body, type=_undecoded(fields, others))
    except msgspec.ValidationError as error:
        message = str(error)
        if message.startswith(_UNKNOWN_FIELD):
            raise _unknown(message[len(_UNKNOWN_FIELD) : -1]) from error
        raise invalid(f"the JSON of the request body: {message}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the request body is not JSON: {error}") from error
    served = {}
    for name, value in msgspec.structs.asdict(given).items():
        if value is msgspec.UNSET:
            continue
        if name in fields:
            served[name] = value
            _check_bounds(name, bytes(value))
        elif name in unsupported:
            _check_changes_nothing(name, value, unsupported[name])
    # Not `body`, which may have a parameter several times.
    return read_json(kind, msgspec.json.encode(served))


@functools.cache
def _undecoded(fields: Sequence[str], others: Sequence[str]) -> type[msgspec.Struct]:
    """A struct that accepts these fields without decoding them. Decoding ends at the first unknown
    name."""
    optional = msgspec.Raw | msgspec.UnsetType
    names = dict.fromkeys((*fields, *others))
    return msgspec.defstruct(
        "Undecoded", [(name, optional, msgspec.UNSET) for name in names], forbid_unknown_fields=True
    )


def _unknown(name: str) -> ApiError:
    return invalid(f"unknown parameter {shortened(name)!r}", param=name, code="unknown_parameter")


def _check_bounds(name: str, value: bytes) -> None:
    """Raise ApiError if decoding the parameter could take long, or if a prompt has several kinds of
    items."""
    if name not in _PROMPTS:
        maximum = MAX_TOOLS_BYTES if name == "tools" else MAX_PARAMETER_BYTES
        if len(value) > maximum:
            raise invalid(
                f"{name} has {len(value)} bytes of JSON; at most {maximum} are allowed",
                param=name,
            )
        return
    first = _FIRST_ITEM.match(value)
    if name == "documents":
        if value.count(b'"') - value.count(b'\\"') > 2 * MAX_DOCUMENT_TEXTS:
            raise invalid(f"documents has more than {MAX_DOCUMENT_TEXTS} texts", param=name)
    elif name == "messages" or (first is not None and first[1] == b"{"):
        if value.count(b"{") > MAX_OBJECTS:
            raise invalid(f"{name} has more than {MAX_OBJECTS} objects or braces", param=name)
    elif first is not None and first[1] != b"]":
        _check_items(name, first[1], value)


def _check_items(name: str, first: bytes, value: bytes) -> None:
    """value: a list that is not empty. first: the first character of its first item."""
    kind: Any
    if first == b'"':
        # Texts have two quotes that are not escaped, or one if they end with a backslash.
        kind, num_items = list[str], (value.count(b'"') - value.count(b'\\"')) // 2
    else:  # no item can be a text with these characters in it
        kind = list[list[int]] if first == b"[" else list[int]
        num_items = value.count(b"[") - 1
        if value.count(b",") >= MAX_TOKEN_IDS:
            raise invalid(f"{name} has more than {MAX_TOKEN_IDS} token ids", param=name)
    if num_items > MAX_ITEMS:
        raise invalid(f"{name} has {num_items} items; at most {MAX_ITEMS} are allowed", param=name)
    try:
        msgspec.json.decode(value, type=kind)
    except msgspec.ValidationError as error:
        if "at `$[0]" not in str(error):
            raise invalid(
                f"{name} mixes texts, token ids and lists of token ids; use one kind ({error})",
                param=name,
            ) from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # reported when the whole request is decoded


def read_json(kind: type[JsonT], body: bytes) -> JsonT:
    """`body` as `kind`. Raises ApiError (400) naming the invalid field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        field = field_at_fault(error)
        where = "" if field else "the JSON of the request body: "
        raise invalid(f"{where}{shortened(str(error))}", param=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the request body is not JSON: {error}") from error


def field_at_fault(error: msgspec.ValidationError) -> str | None:
    """The name of the field with the wrong type."""
    match = _FIELD_OF_ERROR.search(str(error))
    return match and (match[1] or match[2])


def _check_changes_nothing(name: str, value: msgspec.Raw, neutral: Sequence[object]) -> None:
    given = read_json(Any, value) if len(value) <= MAX_NEUTRAL_BYTES else value
    if given is None or any(
        given == item and isinstance(given, bool) == isinstance(item, bool) for item in neutral
    ):
        return
    advice = "remove it"
    if neutral:
        values = " or ".join(msgspec.json.encode(item).decode() for item in neutral)
        advice += f" or set it to {values}"
    raise invalid(
        f"{name} is not supported; {advice}", param=name, code="unsupported_parameter"
    ) from None
