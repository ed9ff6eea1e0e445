"""A step with structured output, between its forward pass and its sampling."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from longshore.protocol.errors import PlanMismatch
from longshore.protocol.plan import SampleMask
from longshore.worker.sampling.token_masks import TokenMask, mask_width
from longshore.worker.step.step_batch import Int64s


class UnsampledStep:
    """Computes its logits as soon as its plan has arrived, and samples when its `SampleMask` has:
    a grammar needs the preceding token first, which comes from the step before.

    step: number of the step.
    """

    def __init__(
        self,
        step: int,
        *,
        sampled_rows: Int64s,
        is_masked: npt.NDArray[np.bool_],
        vocab_size: int,
        pin_memory: bool,
    ) -> None:
        """sampled_rows: (n,) the step's sampling rows. is_masked: (n,) bool, those with structured
        output."""
        self.step = step
        self._samples: Int64s = np.flatnonzero(is_masked)
        self._rows = sampled_rows[self._samples]
        self._vocab_size = vocab_size
        self._pin_memory = pin_memory
        self._sample: Callable[[TokenMask | None], object] | None = None

    def launched(self, sample: Callable[[TokenMask | None], object]) -> None:
        """The forward pass is on the compute queue. sample: submits the rest."""
        self._sample = sample

    def sample(self, mask: SampleMask) -> None:
        """Submit the rest of the step. Raises PlanMismatch if the mask is not of its rows."""
        if not np.array_equal(mask.rows, self._rows):
            raise PlanMismatch(
                f"the token mask of step {self.step} is for rows {mask.rows.tolist()}, but rows "
                f"{self._rows.tolist()} of this step have structured output"
            )
        num_bytes = len(self._rows) * mask_width(self._vocab_size)
        if len(mask.bits) != num_bytes:
            raise PlanMismatch(
                f"the token mask of step {self.step} has {len(mask.bits)} bytes; {len(self._rows)} "
                f"rows with a vocabulary of {self._vocab_size} tokens need {num_bytes}"
            )
        self._submit(
            TokenMask.of(
                self._samples,
                mask.bits,
                vocab_size=self._vocab_size,
                pin_memory=self._pin_memory,
            )
        )

    def sample_unmasked(self) -> None:
        """Submit the rest of the step without a mask. Its tokens are meaningless."""
        self._submit(None)

    def _submit(self, mask: TokenMask | None) -> None:
        assert self._sample is not None, "the launcher has called `launched`"
        self._sample(mask)
