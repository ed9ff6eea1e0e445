"""Calls the hooks of the connector's scheduler half. What they raise ends the engine."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from longshore.connectors.base import RequestView, SchedulerConnector
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.outputs import FinishReason
from longshore.scheduler.request import Request

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class ConnectorFailed(LongshoreError):
    """A hook of the scheduler half raised, so it is unknown which blocks its transfers use. The
    engine must stop."""


class ConnectorHooks:
    """Calls the hooks, none of which may raise.

    may_have_work: `has_pending_work` may be True, because a hook was called since it was False.
    """

    def __init__(self, connector: SchedulerConnector) -> None:
        self._connector = connector
        self._needs_every_step = connector.needs_every_step
        self.may_have_work = True

    def call(self, hook: Callable[..., Result], *arguments: object) -> Result:
        """Call a hook. Raises ConnectorFailed if it raises."""
        self.may_have_work = True
        try:
            return hook(*arguments)
        except Exception as error:
            raise self._failed(hook.__name__, error) from error

    def _failed(self, hook: str, error: Exception) -> ConnectorFailed:
        name = f"{hook} of the connector {type(self._connector).__name__}"
        logger.exception("%s raised", name)
        return ConnectorFailed(
            f"{name} raised {type(error).__name__}: {error}. The engine stops, because it is "
            "unknown which blocks the connector's transfers use. Correct the connector, or "
            "start without it."
        )

    @property
    def has_pending_work(self) -> bool:
        """Whether the connector has instructions for the workers, or waits for an answer."""
        try:
            return self._connector.has_pending_work
        except Exception as error:
            raise self._failed("has_pending_work", error) from error

    def take_answered(self, now: float) -> Sequence[str]:
        """Called so often that it must not make the next plan ask for instructions."""
        try:
            return self._connector.take_answered(now)
        except Exception as error:
            raise self._failed("take_answered", error) from error

    def wants_next_plan(self) -> bool:
        """Whether the connector must be asked for its instructions in a plan that does not change
        the prefix cache. If not, `may_have_work` is False until the next hook."""
        self.may_have_work = self._needs_every_step or self.has_pending_work
        return self.may_have_work

    def shutdown(self) -> None:
        """The engine stops. If the hook raises, it stops without it."""
        try:
            self._connector.shutdown()
        except Exception:
            name = type(self._connector).__name__
            logger.exception("shutdown of the connector %s raised; stopping without it", name)


def view_of(
    request: Request,
    token_ids: Int32Array | None = None,
    waiting_s: float = 0.0,
    max_wait_s: float = math.inf,
    finish_reason: FinishReason | None = None,
    finished_s: float = 0.0,
) -> RequestView:
    """A connector's view of a request. token_ids: of a running one."""
    token_ids = (request.token_ids if token_ids is None else token_ids).view()
    token_ids.setflags(write=False)
    options = request.options
    return RequestView(
        request_id=request.request_id,
        token_ids=token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        block_hashes=() if options.no_store else request.block_hashes,
        kv_transfer_params=options.kv_transfer_params,
        cache_salt=options.cache_salt,
        lora_name=request.lora_name,
        job_id=options.job_id,
        waiting_s=waiting_s,
        max_wait_s=max_wait_s,
        finish_reason=finish_reason,
        finished_s=finished_s,
        cache_hint=options.cache_hint,
        tenant=options.tenant,
        multimodal=options.multimodal,
        prompt_embeds=options.prompt_embeds,
    )
