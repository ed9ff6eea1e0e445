"""What requests of each API may say beside the parameters that are served: one table for all.

docs/api.md states the rule. A field that is in no row is unknown: it is ignored, and named in the
response (see `unknown_fields`).
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

from longshore.deploy.requests.refused import Refusal, of_values


class Hint(NamedTuple):
    """The answer means the same without it, so any value is accepted. The response names it, unless
    its value is null, or a neutral one, which asks for nothing.

    is_named: False: this server has no use for it by its nature, such as a label for billing, so
        the response does not name it, and strict requests may have it.
    """

    neutral: tuple[object, ...] = ()
    is_named: bool = True


LABEL: Final = Hint(is_named=False)
FieldRule: TypeAlias = Hint | Refusal
FieldRules: TypeAlias = Mapping[str, FieldRule]

_LABELS: Final = dict.fromkeys(("metadata", "safety_identifier", "user"), LABEL)
_THREADS: Final = "this server holds no state of messages; send the whole conversation without it"

FIELD_RULES: Final[Mapping[str, FieldRules]] = {
    "openai": {
        **_LABELS,
        "prediction": Hint(),
        "service_tier": Hint(("auto", "default")),
        "store": Hint((False,)),
        "verbosity": Hint(("medium",)),
        "web_search_options": Hint(),
        **of_values(
            {
                "add_generation_prompt": (True,),
                "allowed_token_ids": (),
                "audio": (),
                "best_of": (1,),
                "chat_template": (),
                "chat_template_kwargs": ({},),
                "continue_final_message": (False,),
                "documents": ([],),
                "ec_transfer_params": (),
                "function_call": ("none",),
                "functions": ([],),
                "kv_transfer_params": (),
                "length_penalty": (1,),
                "logits_processors": ([],),
                "logprob_token_ids": (),
                "media_io_kwargs": ({},),
                "mm_processor_kwargs": (),
                "modalities": (["text"],),
                "moderation": (),
                "no_store": (False,),
                "parallel_tool_calls": (True, False),
                "prompt_embeds": (),
                "repetition_detection": (),
                "return_prompt_text": (False,),
                "suffix": ("",),
                "thinking_token_budget": (-1,),
                "tool_choice": ("none", "auto"),
                "tools": ([],),
                "top_logprobs": (0,),
                "use_beam_search": (False,),
                "vllm_xargs": ({},),
                "watermarking": (False,),
            }
        ),
    },
    "transcription": {
        **_LABELS,
        **of_values(
            {
                "chunking_strategy": (),
                "include": (),
                "keywords": (),
                "known_speaker_names": (),
                "known_speaker_references": (),
                "languages": (),
                "timestamp_granularities": (),
            }
        ),
    },
    "responses": {
        "safety_identifier": LABEL,
        "access_programs": Hint(),
        "background_options": Hint(),
        "client_metadata": Hint(),
        "context_management": Hint(([],)),
        "image": Hint(),
        "max_tool_calls": Hint(),  # of the tools that the server runs
        "service_tier": Hint(("auto", "default")),
        "truncation": Hint(("disabled",)),
        **of_values({"conversation": (), "moderation": (), "prompt": (), "top_logprobs": (0,)}),
    },
    "anthropic": {
        "metadata": LABEL,
        "user_profile_id": LABEL,
        "workspace_id": LABEL,
        "betas": Hint(([],)),
        "billing_policy": Hint(),
        "context_management": Hint(),
        "diagnostics": Hint(),
        "fallback_credit_token": Hint(),
        "fallbacks": Hint(([], "default")),
        "inference_geo": Hint(),
        "mcp_servers": Hint(([],)),
        "service_tier": Hint(("auto", "standard_only")),
        "speed": Hint(("standard",)),
        **of_values({"compaction": (), "container": ()}),
        "thread": Refusal((), _THREADS, "thread_unsupported_request"),
    },
    "ollama": {
        "options": Hint(({},)),
        "shift": Hint((False,)),
        "truncate": Hint((False,)),
        "context": Refusal(([],), "send the messages to /api/chat instead"),
        **of_values({"height": (0,), "images": ([],), "steps": (0,), "width": (0,)}),
        "template": Refusal(("",), "send the whole prompt, with raw=true, instead"),
    },
    "ollama_options": {
        **dict.fromkeys(  # of the process that loads the model
            (
                *("embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch"),
                *("num_gpu", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"),
            ),
            LABEL,
        ),
        "mirostat_eta": Hint(),
        "mirostat_tau": Hint(),
        "num_ctx": Hint(),
        "num_keep": Hint(),
        "penalize_newline": Hint((True,)),
        **of_values({"mirostat": (0,), "tfs_z": (1,), "typical_p": (1,)}),
    },
}
"""By API. The names of parameters that an API serves have no effect here."""


class KnownFields(NamedTuple):
    """The fields of an object, each with those of the object that it holds, if these are known."""

    fields: Mapping[str, "KnownFields | None"]


def _known(*names: str, **nested: KnownFields) -> KnownFields:
    return KnownFields({**dict.fromkeys(names), **nested})


_FUNCTION: Final = ("name", "description", "parameters", "strict")
_GRAMMAR: Final = ("syntax", "definition")

TOOL_FIELDS: Final[Mapping[str, Mapping[str, KnownFields]]] = {
    "openai": {
        # `return` is of Hugging Face's templates.
        "function": _known("type", function=_known(*_FUNCTION, "return")),
        "custom": _known(
            "type",
            custom=_known("name", "description", format=_known("type", grammar=_known(*_GRAMMAR))),
        ),
    },
    "responses": {
        "function": _known("type", *_FUNCTION),
        "custom": _known("type", "name", "description", format=_known("type", *_GRAMMAR)),
    },
}
"""Of each type of tools that clients run, in the APIs that take them as plain objects. Others are
unknown, and are not part of the prompt."""
CHOICE_FIELDS: Final[Mapping[str, KnownFields]] = {
    "function": _known("type", function=_known("name")),
    "custom": _known("type", custom=_known("name")),
    "allowed_tools": _known("type", allowed_tools=_known("mode", "tools")),
}
"""Of each type of `tool_choice` in chats."""
