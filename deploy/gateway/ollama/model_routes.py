"""What Ollama's API says about models, and the paths that would change which ones there are."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from longshore.deploy.gateway.api.endpoint import (
    Service,
    check_model,
    read_in_turn,
)
from longshore.deploy.gateway.api.errors import ApiError
from longshore.deploy.gateway.api.parameters import read_parameters
from longshore.deploy.gateway.config import ModelConfig
from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.ollama.bodies import (
    NEVER,
    OllamaModel,
    OllamaModelCard,
    OllamaModelDetails,
    OllamaModels,
    OllamaVersion,
    timestamp,
)
from longshore.deploy.gateway.ollama.requests import OllamaNames, served_name
from longshore.deploy.model.json_file import read_json_object
from longshore.protocol.gguf_header import STORED_DTYPE
from longshore.protocol.model_files import exists

OLLAMA_VERSION: Final = "0.13.0"
"""Whose API this is. Clients ask for the version to learn what a server can do."""

REFUSED_OPERATIONS: Final = (
    ("/api/pull", "POST", "pull"),
    ("/api/push", "POST", "push"),
    ("/api/create", "POST", "create"),
    ("/api/copy", "POST", "copy"),
    ("/api/delete", "DELETE", "delete"),
    ("/api/blobs/{digest}", "POST", "create"),
)


class OllamaShowRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /api/show. name: the former name of `model`. verbose: there is no more to tell."""

    model: str = ""
    name: str = ""
    verbose: bool | None = None


class OllamaModelFacts:
    """What is known of a model before the engine is ready.

    created: when it began to be served, in Unix time.
    """

    def __init__(self, model: ModelConfig, *, created: int) -> None:
        self._model = model
        self._folder = Path(model.folder)
        self._created = created

    @property
    def name(self) -> str:
        """The first one of the model."""
        return self._model.name

    @cached_property
    def _config(self) -> dict[str, Any]:
        file = self._folder / "config.json"
        return read_json_object(file) if exists(file) else {}

    @cached_property
    def details(self) -> OllamaModelDetails:
        family = str(self._config.get("model_type", ""))
        quantization = self._config.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        stored = self._config.get(STORED_DTYPE)
        dtype = self._config.get("dtype") or self._config.get("torch_dtype")
        return OllamaModelDetails(
            format="gguf" if stored else "safetensors",
            family=family,
            families=(family,) if family else (),
            quantization_level=str(method or stored or dtype or ""),
        )

    @cached_property
    def model_info(self) -> dict[str, Any]:
        architecture = self.details.family or "unknown"
        numbers = {
            "context_length": self._model.max_model_len,
            "vocab_size": self._config.get("vocab_size"),
            "block_count": self._config.get("num_hidden_layers"),
            "embedding_length": self._config.get("hidden_size"),
        }
        known = {
            f"{architecture}.{name}": number
            for name, number in numbers.items()
            if number is not None
        }
        return {"general.architecture": architecture, **known}

    @cached_property
    def listed(self) -> list[OllamaModel]:
        """The model, by each of its names."""
        files = self._folder.iterdir() if self._folder.is_dir() else ()
        size = sum(file.stat().st_size for file in files if file.is_file())
        return [
            OllamaModel(
                name=name,
                model=name,
                modified_at=timestamp(self._created),
                size=size,
                digest=self._model.fingerprint,
                details=self.details,
            )
            for name in self._model.names
        ]

    def running(self, sleeps_in_s: float) -> list[OllamaModel]:
        """The loaded model, by each of its names. sleeps_in_s: infinite: it does not."""
        never = math.isinf(sleeps_in_s)
        return [
            msgspec.structs.replace(
                model,
                expires_at=NEVER if never else timestamp(time.time() + sleeps_in_s),
                size_vram=model.size,
                context_length=self._model.max_model_len,
            )
            for model in self.listed
        ]


class OllamaShowEndpoint(OllamaNames):
    """What is known of a model, by one of its names."""

    path = "/api/show"

    def __init__(self, facts: Sequence[OllamaModelFacts]) -> None:
        super().__init__()
        self._facts = {each.name: each for each in facts}

    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        asked = read_parameters(OllamaShowRequest, await read_in_turn(exchange, service), rules={})
        check_model(served_name(asked.model or asked.name, service.names), service)
        facts = self._facts[service.model_name]
        card = OllamaModelCard(
            modified_at=facts.listed[0].modified_at,
            details=facts.details,
            model_info=facts.model_info,
            capabilities=_capabilities(service),
            template="" if service.tokenizer is None else service.tokenizer.chat_template.source,
        )
        await exchange.send_json(msgspec.json.encode(card))


class OllamaModelRoutes:
    """loaded: returns the names of the models that are loaded, with the seconds until they sleep if
    no request comes."""

    def __init__(
        self, facts: Sequence[OllamaModelFacts], loaded: Callable[[], Mapping[str, float]]
    ) -> None:
        self._facts = facts
        self._loaded = loaded
        self.routes = (
            Route("/api/version", self._version),
            Route("/api/tags", self._tags),
            Route("/api/ps", self._ps),
            *(
                Route(path, _refusal(verb), methods=[method])
                for path, method, verb in REFUSED_OPERATIONS
            ),
        )

    async def _version(self, request: Request) -> Response:
        return _json(OllamaVersion(OLLAMA_VERSION))

    async def _tags(self, request: Request) -> Response:
        return _json(OllamaModels([model for facts in self._facts for model in facts.listed]))

    async def _ps(self, request: Request) -> Response:
        loaded = self._loaded()
        models = (
            model
            for facts in self._facts
            if facts.name in loaded
            for model in facts.running(loaded[facts.name])
        )
        return _json(OllamaModels(list(models)))


def _capabilities(service: Service) -> list[str]:
    generates = service.speech is None and service.classifier is None
    pools = service.embedding
    if pools is not None and pools.is_only:
        generates = False
    named = {
        "completion": generates,
        "tools": generates and service.parsers.tools is not None,
        "thinking": generates and service.parsers.reasoning is not None,
        "embedding": pools is not None,
    }
    return [name for name, has in named.items() if has]


def _refusal(verb: str) -> Callable[[Request], Any]:
    async def refuse(request: Request) -> NoReturn:
        raise ApiError(
            400,
            f"this server does not {verb} models: it serves those that it was started with, as "
            "`longshore serve MODEL [MODEL ...]`",
            code="unsupported_operation",
        )

    return refuse


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
