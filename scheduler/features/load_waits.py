"""How long a request waits for KV of a connector: as long as computing it would take.

Whoever waits for as long as the alternative takes, and then takes it, needs at most twice the time
of the better choice, whatever the tier does (the ski rental problem: Karlin et al., 1988). What
arrives later is not used. The rule applies to a lookup that is not answered (`AskLater`) and to a
load, each with a limit of its own.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.features.swap_cost import PrefillRate
from longshore.scheduler.step.running import RunningTable

ASSUMED_TOKEN_S: Final = 0.001
"""Seconds to compute a token of a prompt, until a large prefill has been measured. Slow on purpose:
the first requests after a start load what a tier has, rather than compute it."""

CONNECTOR_SHARE: Final = 0.8
"""Share of a load's limit that its connector is told, so that what it has by then can be copied and
reported before the limit."""


@dataclass(frozen=True, slots=True)
class LoadWaits:
    """The limits, from the measured prefill rate and what is to be computed first.

    min_wait_s: of the connector, see SchedulerConnector.
    """

    config: SchedulerConfig
    running: RunningTable
    prefill_rate: PrefillRate
    min_wait_s: float = 0.0

    def limit_s(self, num_tokens: int, num_loading: int) -> float:
        """Seconds for `num_tokens` tokens: those in which they, the rest of the running requests'
        prompts, and the `num_loading` tokens of the loads in progress could be computed. Loads in
        progress count, because a tier serves one after the other, and without it all of them would
        be computed. At least `min_load_wait_s`, at most `load_timeout_s`; that long in any case if
        a failed load is not computed."""
        config = self.config
        if config.load_failure_policy == "fail":
            return config.load_timeout_s
        rate = self.prefill_rate.estimate(ASSUMED_TOKEN_S)
        running = self.running
        num_left = int(np.maximum(running.num_tokens - running.num_computed, 0).sum())
        compute_s = (num_tokens + num_loading + num_left) / rate
        wait_s = max(compute_s, config.min_load_wait_s, self.min_wait_s)
        return min(wait_s, config.load_timeout_s)

    def connector_limit_s(self, limit_s: float) -> float:
        """What the connector of a load is told."""
        is_final = self.config.load_failure_policy == "fail"
        return math.inf if is_final else CONNECTOR_SHARE * limit_s
