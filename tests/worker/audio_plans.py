"""Hand-made plans for a model with an encoder, with blocks for encoder tokens and for a row's
own."""

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from longshore.protocol.arrays import int32_array
from longshore.protocol.plan import RowStart, SchedulerOutput
from longshore.protocol.requests import MultimodalFeature
from tests.worker.plans import Planner


def audio(samples: npt.NDArray[np.float32], num_tokens: int) -> MultimodalFeature:
    data = samples.astype("<f4").view(np.uint8)
    return MultimodalFeature(
        hash=hashlib.sha256(data.tobytes()).hexdigest(),
        offset=0,
        num_tokens=num_tokens,
        modality="audio",
        data=data,
    )


class AudioPlanner(Planner):
    """Group 0 is the decoder's, group 1 that of cross attention; blocks have equal size.

    sounds: audio by row; a row that starts takes its entry.
    cross:  blocks of the encoder's tokens, by row.
    """

    def __init__(self, *, num_encoder_tokens: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.num_encoder_tokens = num_encoder_tokens
        self.sounds: dict[int, npt.NDArray[np.float32]] = {}
        self.cross: dict[int, list[int]] = {}

    def plan(self, *args: Any, finished: Iterable[int] = (), **settings: Any) -> SchedulerOutput:
        for row in finished:
            self.free = self.cross.pop(row) + self.free
        plan = super().plan(*args, finished=list(finished), **settings)
        started = tuple((start.row, 0) for start in plan.added)
        return msgspec.structs.replace(plan, encoder_inputs=started)

    def _with_blocks(self, start: RowStart) -> RowStart:
        count = -(-self.num_encoder_tokens // self.block_size)
        self.cross[start.row] = [self.free.pop() for _ in range(count)]
        own = super()._with_blocks(start)
        return msgspec.structs.replace(
            own,
            block_ids=(*own.block_ids, int32_array(self.cross[start.row])),
            multimodal=(audio(self.sounds[start.row], self.num_encoder_tokens),),
        )
