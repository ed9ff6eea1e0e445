"""When masks of sampled tokens come, and what they allow."""

from collections.abc import Iterable, Sequence

import numpy as np

from longshore.protocol.plan import SampleMask
from tests.harness.worker_rows import Step


def take_masks(
    new: Iterable[SampleMask], unanswered: Sequence[Step], masks: dict[int, SampleMask]
) -> None:
    """Add new masks to those that have come, by step. Each is for the oldest unanswered plan, as
    later ones depend on its tokens."""
    for mask in new:
        assert mask.step == unanswered[0].plan.step, "a mask before the tokens that it depends on"
        assert mask.step not in masks, "a second mask"
        assert set(mask.rows.tolist()) == unanswered[0].masked
        masks[mask.step] = mask


def check_mask(step: Step, masks: dict[int, SampleMask]) -> None:
    """The mask of a step, which has come, allows all that was sampled in it."""
    if not step.masked:
        return
    mask = masks.pop(step.plan.step)
    bits = mask.bits.reshape(len(mask.rows), -1)
    for row in step.masked:
        tokens = step.sampled[row]
        allowed = np.unpackbits(bits[mask.rows == row], axis=1, bitorder="little")
        assert len(tokens) <= len(allowed)
        assert all(allowed[index, token] for index, token in enumerate(tokens))
