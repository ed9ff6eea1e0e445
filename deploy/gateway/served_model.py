"""One model of a gateway: its engines, and what its requests are read and answered with."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from longshore.deploy.gateway.api.endpoint import Service
from longshore.deploy.gateway.api.prompt_nonces import PromptNonces
from longshore.deploy.gateway.api.prompts import PromptReader
from longshore.deploy.gateway.api.sealed_reasoning import ReasoningSeal
from longshore.deploy.gateway.config import GatewayConfig, ModelConfig
from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.engines.split_metrics import SplitMetrics
from longshore.deploy.gateway.idle_sleep import IdleSleep, Perform
from longshore.deploy.gateway.key_usage import KeyUsage
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.router.routing import Routing
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer, load_tokenizer
from longshore.deploy.parsers.answer import AnswerParsers
from longshore.deploy.parsers.registry import load_parsers
from longshore.deploy.requests.speech import SpeechModel
from longshore.protocol.commands import EngineMember
from longshore.protocol.handshake import ClientHello, EngineReady

if TYPE_CHECKING:
    from longshore.deploy.requests.spans import RequestSpans

SHARED: Final = ("audio_decoder", "json", "turns", "end_turns", "seal")
"""Fields of Service that are the same for all models of a gateway."""


class ServedModel:
    """Create it inside a running loop.

    spans:       of requests, if they are exported.
    perform:     see IdleSleep; None: engines do not sleep by themselves.
    why_stopped: see EngineClient.
    why_lost:    see Engines.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        *,
        spans: "RequestSpans | None",
        perform: Perform | None,
        why_stopped: Callable[[], str | None],
        why_lost: Callable[[int], str | None],
    ) -> None:
        self.config = model
        self.metrics = metrics
        self._of_gateway = config
        self._tokenizer: ModelTokenizer | None = None
        members = model.members
        num_gateways = max(1, len(config.peers)) + config.num_elsewhere
        self.routing = Routing(
            model.routing, members, number=config.number, num_gateways=num_gateways
        )
        metrics.watch(self.routing)
        name = f"gateway {config.number}" if len(config.peers) > 1 else "gateway"
        self.engines = Engines(
            (),
            ClientHello(name=name, model_fingerprint=model.fingerprint),
            router=self.routing.router,
            split_config=config.split,
            num_gateways=num_gateways,
            number=config.number,
            seed=config.seed,
            on_submit=self._note_request,
            on_stats=metrics.observe_scheduler,
            on_ready=self._note_ready,
            why_stopped=why_stopped,
            why_lost=why_lost,
        )
        for member in members:
            self.engines.add_engine(member.number, member.clients)
        if any(member.role != "unified" for member in members):
            metrics.watch(SplitMetrics(self.engines.split))
        self._spans = None if spans is None else spans.of_model(model.name)
        self.idle_sleep = None
        if perform is not None and (idle_s := model.settings.idle_sleep_s):
            self.idle_sleep = IdleSleep(model.name, self.engines, idle_s, perform)

    def _note_request(self) -> None:
        if self.idle_sleep is not None:
            self.idle_sleep.note_request()

    @property
    def not_ready_reason(self) -> str | None:
        """Why requests wait; None if an engine is ready, or is woken by the next request."""
        if self.idle_sleep is not None and self.engines.is_asleep:
            return None
        return self.engines.not_ready_reason

    def _note_ready(self, engine: int, is_ready: bool) -> None:
        self.routing.follow(engine, is_ready)
        if not is_ready:
            self.metrics.engine_lost(str(engine))
        elif (ready := self.engines.clients[engine].ready) is not None:
            self.metrics.engine_ready(str(engine), ready)

    def add_engine(self, member: EngineMember) -> None:
        """Use another engine, once it is ready."""
        self.routing.add_engine(member)
        self.engines.add_engine(member.number, member.clients)

    def remove_engine(self, engine: int) -> None:
        """Use an engine no more, which is not the only one."""
        self.routing.remove_engine(engine)
        self.engines.remove_engine(engine)
        self.metrics.remove_engine(str(engine))

    def load_tokenizer(self) -> None:
        """Takes up to seconds."""
        model = self.config
        self._tokenizer = load_tokenizer(
            Path(model.folder),
            None if model.tokenizer_file is None else Path(model.tokenizer_file),
            chat_template_file=None if model.chat_template is None else Path(model.chat_template),
            advice_level=logging.WARNING if model.generates_text else logging.DEBUG,
        )

    async def wait_until_ready(self) -> EngineReady:
        """Wait until its engines are ready, and routing knows what they hold. Raises
        HandshakeRejected or EngineDead."""
        ready = await self.engines.wait_until_ready(awaits_all=self._of_gateway.awaits_all_engines)
        await self.routing.wait_until_known()
        return ready

    def service(
        self, engine: EngineReady | None, key_usage: KeyUsage, first: Service | None
    ) -> Service:
        """What endpoints serve its requests with.

        engine: one that is ready; None: none is yet.
        first:  the service of the gateway's first model, with which this one shares what is not a
                model's; None: this is the first.
        """
        config, model, tokenizer = self._of_gateway, self.config, self._tokenizer
        key = config.reasoning_key
        seal = ReasoningSeal(None if key is None else bytes.fromhex(key))
        shared: dict[str, Any] = {"seal": seal}
        if first is not None:
            shared = {name: getattr(first, name) for name in SHARED}
        settings = model.settings
        max_model_len = model.max_model_len if engine is None else engine.identity.max_model_len
        speech = None
        if model.audio is not None:
            speech = SpeechModel(
                Path(model.folder),
                model.audio,
                tokenizer,
                vocab_size=model.vocab_size,
                max_model_len=model.max_model_len,
            )
        prompts = PromptReader(
            tokenizer,
            model.sampling_defaults,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=model.eos_token_ids,
            nonces=PromptNonces(settings.prompt_nonces or ()),
            template_variables=settings.template_variables,
            keeps_states=model.keeps_states,
        )
        routing = model.routing
        by_session = routing.routing_policy == "session_affinity"
        return Service(
            model.name,
            self.engines,
            tokenizer,
            prompts,
            self.metrics,
            config.max_body_bytes,
            settings.max_live_requests,
            key_usage,
            speech,
            config.max_audio_bytes,
            settings.max_audio_s,
            model.embedding,
            model.classifier,
            transfers=config.transfers,
            parsers=_answer_parsers(model, tokenizer),
            max_forced_calls=settings.max_forced_calls,
            has_score_template=model.chat_template is not None,
            model_aliases=model.aliases,
            session_header=routing.routing_session_header if by_session else None,
            spans=self._spans,
            idle_sleep=self.idle_sleep,
            **shared,
        )

    def close(self) -> None:
        self.engines.close()
        self.routing.close()
        if self._tokenizer is not None:
            self._tokenizer.close()


def _answer_parsers(model: ModelConfig, tokenizer: ModelTokenizer | None) -> AnswerParsers:
    source = ""
    if tokenizer is not None:
        template = tokenizer.chat_template
        source = template.source if template.tool_use is None else template.tool_use.source
    return load_parsers(model.settings.tool_call_parser, model.settings.reasoning_parser, source)
