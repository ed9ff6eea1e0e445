"""What the ranks of an engine do with the plans of a scheduler that has died.

A plan may have reached only some ranks, which then wait for the others in an exchange. So each rank
computes every plan that any of them has received. After that, all have made the same exchanges, and
a new epoch can begin. The ranks tell each other through the store by which they have found each
other.
"""

import time
from collections import deque
from typing import Any, Final

import msgspec

from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.transport.codec import Decoder, Encoder
from longshore.worker.errors import RankLost

NUM_KEPT: Final = 32
"""More than a scheduler sends before it has an answer."""


class LastPlans:
    """The last plans of one epoch that this rank has received.

    store:     a `torch.distributed.Store` that all ranks share.
    timeout_s: how long this rank waits for the plans of the others.
    """

    def __init__(
        self, store: Any, *, rank: int, num_ranks: int, epoch: int, timeout_s: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"last plans of rank {each} in epoch {epoch}" for each in range(num_ranks)]
        self._timeout_s = timeout_s
        self._deadline_s = 0.0
        self._plans: deque[SchedulerOutput] = deque(maxlen=NUM_KEPT)

    def add(self, plan: SchedulerOutput) -> None:
        """A plan that this rank computes."""
        self._plans.append(plan)

    def publish(self) -> None:
        """Tell the other ranks; no plan will be added."""
        encoder: Encoder[SchedulerOutput] = Encoder()
        plans = [[bytes(frame) for frame in encoder.encode(plan)] for plan in self._plans]
        self._store.set(self._keys[self._rank], msgspec.msgpack.encode(plans))
        self._deadline_s = time.monotonic() + self._timeout_s

    def missed(self) -> list[SchedulerOutput] | None:
        """The plans that only other ranks have received, in order; None until all ranks have
        published theirs. Raises RankLost if one does not in time, or is too far ahead."""
        if not self._store.check(self._keys):
            if time.monotonic() >= self._deadline_s:
                raise RankLost(
                    f"the scheduler has died, and not all ranks of rank {self._rank}'s engine have "
                    f"noticed it within {self._timeout_s:g} s"
                )
            return None
        decoder: Decoder[SchedulerOutput] = Decoder(SchedulerOutput)
        last = self._plans[-1].step if self._plans else 0
        missed: dict[int, SchedulerOutput] = {}
        for key in self._keys:
            for frames in msgspec.msgpack.decode(self._store.get(key), type=list[list[bytes]]):
                plan = decoder.decode(frames)
                if plan.step > last:
                    missed[plan.step] = plan
        steps = sorted(missed)
        if steps and steps[0] != last + 1:
            raise RankLost(
                f"rank {self._rank} has received plans up to step {last}, and another rank those "
                f"of steps {steps[0]} to {steps[-1]}; it cannot catch up"
            )
        return [missed[step] for step in steps]
