"""What `LLM` and `AsyncLLM` make of a model and settings, what they lack, and how their engines
end."""

import logging
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.gateway.text.tokenizer import load_tokenizer
from longshore.deploy.llm.request_reader import RequestReader
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.requests.speech import SpeechModel
from longshore.deploy.settings.options import engine_options
from longshore.deploy.supervisor.engine_plan import EnginePlan, check_host, plan_engine

if TYPE_CHECKING:
    from longshore.deploy.requests.spans import RequestSpans


class _Closable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineModel:
    """speech: None if the model takes text."""

    plan: EnginePlan
    reader: RequestReader
    speech: SpeechModel | None


def read_engine_model(model: str | Path, settings: Mapping[str, Any]) -> EngineModel:
    """model, settings: as for `LLM`. Raises ConfigError."""
    options = engine_options({"log_level": "warning", **settings})
    folder = read_model_folder(model, options.state_dir)
    tokenizer = load_tokenizer(folder.path, folder.tokenizer_file, advice_level=logging.DEBUG)
    plan = plan_engine(options, folder)
    check_host(plan)
    max_model_len = plan.identity.max_model_len
    decoder: TokenDecoder | None = tokenizer
    speech = None
    if folder.audio is not None:
        speech = SpeechModel(
            folder.path,
            folder.audio,
            tokenizer,
            vocab_size=folder.vocab_size,
            max_model_len=max_model_len,
        )
        decoder = speech.tokenizer
    reader = RequestReader(
        folder, tokenizer, decoder, max_model_len=max_model_len, keeps_states=plan.keeps_states
    )
    return EngineModel(plan, reader, speech)


def close_with(
    owner: Any, engine: _Closable, spans: "RequestSpans | None"
) -> "weakref.finalize[Any, Any]":
    """Closes the engine and the spans once: when it is called, or with its owner or the program."""
    return weakref.finalize(owner, _close_in_owner, engine, spans, os.getpid())


def _close_in_owner(engine: _Closable, spans: "RequestSpans | None", owner_pid: int) -> None:
    """Do nothing in a forked child: the engine belongs to its parent."""
    if os.getpid() == owner_pid:
        engine.close()
        if spans is not None:
            spans.close()


def no_attribute(cls: str, name: str, not_methods: Mapping[str, str]) -> AttributeError:
    """not_methods: names that vLLM's class has, and why they do not exist here."""
    if (reason := not_methods.get(name)) is None:
        return AttributeError(f"{cls} has no attribute {name!r}")
    return AttributeError(f"{cls}.{name} is not supported: {reason}")
