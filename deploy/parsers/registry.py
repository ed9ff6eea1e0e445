"""Loads parsers by name, or chooses them by a chat template.

Entry point groups `longshore.tool_parsers` and `longshore.reasoning_parsers`, or
`package.module:Class`.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Final, TypeVar

from longshore.deploy.parsers.answer import AnswerParsers
from longshore.deploy.parsers.deepseek import DeepSeekTools
from longshore.deploy.parsers.demo import DemoTools
from longshore.deploy.parsers.gemma import GemmaReasoning, GemmaTools
from longshore.deploy.parsers.harmony import HarmonyReasoning, HarmonyTools
from longshore.deploy.parsers.hermes import HermesTools
from longshore.deploy.parsers.kimi import KimiTools
from longshore.deploy.parsers.llama import LlamaTools
from longshore.deploy.parsers.mistral import MistralTools
from longshore.deploy.parsers.nemotron import NemotronTools
from longshore.deploy.parsers.parser import AnswerParser, ReasoningParser, ToolParser
from longshore.deploy.parsers.think import ThinkReasoning
from longshore.deploy.parsers.xml import GlmTools, MiniMaxTools, Qwen3CoderTools
from longshore.protocol.errors import ConfigError

TOOL_PARSERS_GROUP: Final = "longshore.tool_parsers"
REASONING_PARSERS_GROUP: Final = "longshore.reasoning_parsers"
AUTO: Final = "auto"
NONE: Final = "none"

TOOL_PARSERS: Final[Mapping[str, type[ToolParser]]] = MappingProxyType(
    {
        "deepseek": DeepSeekTools,
        "demo": DemoTools,
        "gemma4": GemmaTools,
        "glm45": GlmTools,
        "harmony": HarmonyTools,
        "hermes": HermesTools,
        "kimi_k2": KimiTools,
        "llama": LlamaTools,
        "minimax_m2": MiniMaxTools,
        "mistral": MistralTools,
        "nemotron": NemotronTools,
        "qwen3_coder": Qwen3CoderTools,
    }
)
REASONING_PARSERS: Final[Mapping[str, type[ReasoningParser]]] = MappingProxyType(
    {"gemma4": GemmaReasoning, "harmony": HarmonyReasoning, "think": ThinkReasoning}
)
ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "deepseek_r1": "think",
        "deepseek_v3": "deepseek",
        "deepseek_v31": "deepseek",
        "glm45": "think",
        "glm47": "glm45",
        "kimi_k2": "think",
        "llama3_json": "llama",
        "llama4_json": "llama",
        "llama4_pythonic": "llama",
        "minimax_m2": "think",
        "openai": "harmony",
        "openai_gptoss": "harmony",
        "pythonic": "llama",
        "qwen3": "think",
        "qwen3_xml": "qwen3_coder",
    }
)
"""vLLM's names of parsers."""

# What the template writes before calls: marks of the formats. A format that shares its tags with
# another one has marks of its own, by which it is excluded.
_TOOL_MARKS: Final = (
    ("demo", ("calls of lookup(container)",), ()),
    ("harmony", ("<|channel|>",), ()),
    ("deepseek", ("<｜tool▁calls▁begin｜>",), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("llama", ("<|python_tag|>", "<|python_start|>", "dictionary of argument name"), ()),
    ("gemma4", ("<|tool_call>call:",), ()),
    ("kimi_k2", ("<|tool_call_begin|>",), ()),
    ("minimax_m2", ("<minimax:tool_call>",), ()),
    ("nemotron", ("<TOOLCALL>",), ()),
    ("qwen3_coder", ("<parameter=",), ("<seed:tool_call>",)),
    ("glm45", ("<arg_key>",), ()),
    ("hermes", ("<tool_call>",), ("<function=", "<arg_key>", "<invoke name=")),
)
_REASONING_MARKS: Final = (
    ("gemma4", "<|channel>"),
    ("harmony", "<|channel|>"),
    ("think", "</think>"),
)

ParserT = TypeVar("ParserT", bound=AnswerParser)


def load_parsers(tools: str, reasoning: str, template: str) -> AnswerParsers:
    """The parsers of these names, for a model with this chat template. Raises ConfigError."""
    return AnswerParsers(
        load_reasoning_parser(reasoning, template), load_tool_parser(tools, template)
    )


def load_tool_parser(name: str, template: str = "") -> ToolParser | None:
    """The parser of a name, or of a chat template if the name is `auto`; None: there is none.
    Raises ConfigError."""
    if name == AUTO:
        for found, marks, excluded in _TOOL_MARKS:
            is_other = any(mark in template for mark in excluded)
            if any(mark in template for mark in marks) and not is_other:
                return TOOL_PARSERS[found]()
        return None
    return _load(name, TOOL_PARSERS, TOOL_PARSERS_GROUP, ToolParser)


def load_reasoning_parser(name: str, template: str = "") -> ReasoningParser | None:
    """Load as `load_tool_parser` does; `none` is a name, too."""
    if name == AUTO:
        for found, mark in _REASONING_MARKS:
            if mark in template:
                return REASONING_PARSERS[found]()
        return None
    return _load(name, REASONING_PARSERS, REASONING_PARSERS_GROUP, ReasoningParser)


def _load(
    name: str, built_in: Mapping[str, type[ParserT]], group: str, kind: Any
) -> ParserT | None:
    """kind: the class to extend."""
    if name == NONE:
        return None
    chosen: Any = built_in.get(name) or built_in.get(ALIASES.get(name, ""))
    source = ""
    if chosen is None:
        point = _entry_point(name, built_in, group)
        source = f" ({point.value})"
        try:
            chosen = point.load()
        except Exception as error:
            raise ConfigError(f"parser {name!r}{source} cannot be loaded: {error!r}") from error
    try:
        parser: Any = chosen()
    except Exception as error:
        raise ConfigError(f"parser {name!r}{source} cannot be created: {error!r}") from error
    if not isinstance(parser, kind):
        raise ConfigError(
            f"parser {name!r}{source} is a {type(parser).__name__}; it must extend "
            f"{kind.__module__}.{kind.__name__}"
        )
    return parser


def _entry_point(name: str, built_in: Mapping[str, object], group: str) -> EntryPoint:
    installed = {each.name: each for each in entry_points(group=group)}
    if name in installed:
        return installed[name]
    if ":" in name:
        return EntryPoint(name, name, group)
    known = (AUTO, NONE, *built_in, *(alias for alias, own in ALIASES.items() if own in built_in))
    raise ConfigError(
        f"unknown parser {name!r}; use one of {', '.join((*known, *installed))} or "
        f"package.module:Class (other packages register names as {group})"
    )
