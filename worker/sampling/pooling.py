"""Vectors of pooling requests: the final-norm hidden state of the last or the first token, the mean
over all tokens, or the classification head's scores of the last one (of the first, for encoders).

Each chunk adds its hidden states to the row's sum until the end of the prompt. Sums are float64, so
that neither their order nor the way a prompt was cut into chunks changes the float32 result.
"""

from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.protocol.arrays import Float32Array, Int32Array, int32_array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import RowStart
from longshore.protocol.requests import PoolingParams
from longshore.worker.models.decoder_model import DecoderModel
from longshore.worker.step.step_batch import Int64s, StepBatch
from longshore.worker.step.upload import PackedUpload, Upload

MAX_SUMMED_ELEMENTS: Final = 1 << 22
"""Elements of hidden states that are converted to float64 at once."""

_SMALLEST_LENGTH: Final = 1e-12


class PoolingRows:
    """The pooling rows, and the number of tokens each has summed.

    is_pooling: (max_num_seqs,).
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.is_pooling = np.zeros(max_num_seqs, np.bool_)
        self._params: list[PoolingParams | None] = [None] * max_num_seqs
        self._num_prompt = np.zeros(max_num_seqs, np.int64)
        self._num_summed = np.zeros(max_num_seqs, np.int64)

    def start(self, start: RowStart) -> None:
        """Start a row. Raises PlanMismatch if it needs hidden states that are not computed here."""
        pooling = start.pooling
        self.is_pooling[start.row] = pooling is not None
        self._params[start.row] = pooling
        self._num_prompt[start.row] = len(start.prompt_token_ids)
        self._num_summed[start.row] = start.num_computed_tokens
        if pooling is not None and pooling.needs_all_states and start.num_computed_tokens:
            raise PlanMismatch(
                f"request {start.request_id} pools all its tokens ({pooling.kind}), but starts "
                f"with {start.num_computed_tokens} computed; the scheduler must not let it read "
                "the prefix cache"
            )

    def take(
        self,
        batch: StepBatch,
        hidden_size: int,
        *,
        num_labels: int = 0,
        is_bidirectional: bool = False,
        pin_memory: bool,
    ) -> "StepPooling | None":
        """What the step adds to the sums, and the vectors that it completes; None if it has no
        pooling row. Raises PlanMismatch if a row is rewound to states that are already summed, is
        to be classified without labels, or has a part of a prompt whose tokens attend to later
        ones."""
        is_chosen = self.is_pooling[batch.rows]
        if batch.primers is not None:
            is_chosen &= ~batch.primers
        chosen = np.flatnonzero(is_chosen)
        if not len(chosen):
            return None
        rows, starts, ends = batch.rows[chosen], batch.starts[chosen], batch.ends[chosen]
        firsts = batch.first_tokens[chosen]
        tokens: list[Int64s] = []
        done: list[int] = []
        for row, start, end, first in zip(
            rows.tolist(), starts.tolist(), ends.tolist(), firsts.tolist(), strict=True
        ):
            pooling = self._params[row]
            assert pooling is not None
            if pooling.needs_all_states and start not in (0, self._num_summed[row]):
                raise PlanMismatch(
                    f"row {row} pools all its tokens ({pooling.kind}) and continues at {start}, "
                    f"but {self._num_summed[row]} of them are already summed"
                )
            if pooling.kind == "classify" and not num_labels:
                raise PlanMismatch(f"row {row} is to be classified, but the model has no labels")
            self._num_summed[row] = end
            is_done = end >= self._num_prompt[row]
            if is_bidirectional and (start or not is_done):
                raise PlanMismatch(
                    f"row {row} computes the tokens {start} to {end} of a prompt of "
                    f"{self._num_prompt[row]}, but they attend to each other in one step"
                )
            kind = pooling.kind
            if kind == "classify":
                kind = "cls" if is_bidirectional else "last"
            tokens.append(_summed_tokens(kind, start, end, is_done=is_done) - start + first)
            if is_done:
                done.append(row)
        sizes = (hidden_size, num_labels)
        return self._packed(rows, starts, tokens, done, sizes, pin_memory=pin_memory)

    def _packed(
        self,
        rows: Int64s,
        starts: Int64s,
        tokens: list[Int64s],
        done: list[int],
        sizes: tuple[int, int],
        *,
        pin_memory: bool,
    ) -> "StepPooling":
        """sizes: elements of a hidden state, and number of labels."""
        hidden_size, num_labels = sizes
        params = [params for row in done if (params := self._params[row]) is not None]
        is_classified = np.array([each.kind == "classify" for each in params], np.bool_)
        kept = np.array([each.dimensions or hidden_size for each in params], np.int64)
        kept[is_classified] = num_labels
        num_summed = [
            self._num_prompt[row] if each.kind == "mean" else 1
            for row, each in zip(done, params, strict=True)
        ]
        upload = Upload()
        begins = (starts == 0) | np.array([not self._needs_all(row) for row in rows.tolist()])
        return StepPooling(
            begun=upload.ints(rows[begins]),
            tokens=upload.ints(np.concatenate(tokens)),
            owners=upload.ints(np.repeat(rows, [len(each) for each in tokens])),
            done=upload.ints(np.array(done, np.int64)),
            num_summed=upload.ints(np.array(num_summed, np.int64)),
            kept=upload.ints(kept),
            is_normalized=upload.ints(np.array([each.normalize for each in params], np.int64)),
            classified=upload.ints(np.flatnonzero(is_classified)),
            rows=np.array(done, np.int64),
            num_kept=kept,
            vectors=torch.empty((len(done), max(sizes)), pin_memory=pin_memory),
            upload=upload.pack(pin_memory=pin_memory),
        )

    def _needs_all(self, row: int) -> bool:
        params = self._params[row]
        return params is not None and params.needs_all_states


def _summed_tokens(
    kind: Literal["mean", "cls", "last"], start: int, end: int, *, is_done: bool
) -> Int64s:
    """Positions in [start, end) whose hidden states are part of the vector."""
    match kind:
        case "mean":
            return np.arange(start, end)
        case "cls":
            return np.arange(start, min(end, 1))
        case "last":
            return np.arange(end - 1, end) if is_done else np.empty(0, np.int64)


class PooledSums:
    """One sum of hidden states per row, on the device; only the compute queue touches it."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._sums: Tensor | None = None  # allocated for the first pooling request

    def of_states(self, hidden: Tensor) -> Tensor:
        """(max_num_seqs, hidden_size) float64, for hidden states (n, hidden_size)."""
        if self._sums is None:
            shape = (self._max_num_seqs, hidden.shape[1])
            self._sums = torch.zeros(shape, dtype=torch.float64, device=hidden.device)
        return self._sums


@dataclass(frozen=True)
class PooledResult:
    """Completed vectors: rows and vectors if finite, otherwise nan_rows and their number of
    non-finite elements."""

    rows: Int32Array
    vectors: tuple[Float32Array, ...]
    nan_rows: Int32Array
    num_nans: Int32Array

    def added_to(
        self, output: ModelRunnerOutput, generates: npt.NDArray[np.bool_]
    ) -> ModelRunnerOutput:
        """generates: which of the rows with results have a token in `output`."""
        counts = np.ones(len(generates), np.int32)
        num_sampled = output.num_sampled
        if len(num_sampled):
            counts[generates] = num_sampled
            num_sampled = int32_array(counts)
        sampled = np.zeros(counts.sum(), np.int32)
        sampled[np.repeat(generates, counts)] = output.sampled_tokens
        return msgspec.structs.replace(
            output,
            sampled_tokens=int32_array(sampled),
            num_sampled=num_sampled,
            pooled_rows=self.rows,
            pooled=self.vectors,
            nan_rows=int32_array(np.concatenate((output.nan_rows, self.nan_rows))),
            num_nans=int32_array(np.concatenate((output.num_nans, self.num_nans))),
        )


@dataclass(frozen=True)
class StepPooling:
    """Pooling of one step; the slices are of `upload`.

    begun:  rows whose sum begins.
    tokens, owners: the step's tokens that are added to sums, and the row of each.
    done:   rows whose vector is complete.
    num_summed, kept, is_normalized: of each of these, the states in its sum, the elements of its
            vector, and whether it is normalised to length 1.
    classified: indices of those that are classified.
    rows, num_kept: the same as `done` and `kept`, on the host.
    vectors: (num_done, elements of the longest possible vector) float32, on the host; zeros after
            the kept elements.
    """

    begun: slice
    tokens: slice
    owners: slice
    done: slice
    num_summed: slice
    kept: slice
    is_normalized: slice
    classified: slice
    rows: Int64s
    num_kept: Int64s
    vectors: Tensor
    upload: PackedUpload

    def run(self, hidden: Tensor, model: DecoderModel, pooled: PooledSums) -> None:
        """Add the step's hidden states, (num_tokens, hidden_size) before the final norm, and
        compute completed vectors. On the compute queue."""
        ints, _ = self.upload.to_device(hidden.device)
        sums = pooled.of_states(hidden)
        sums.index_fill_(0, ints[self.begun], 0)
        tokens, owners = ints[self.tokens], ints[self.owners]
        step = max(1, MAX_SUMMED_ELEMENTS // hidden.shape[1])
        for start in range(0, len(tokens), step):
            piece = slice(start, start + step)
            states = model.last_norm(hidden.index_select(0, tokens[piece]))
            sums.index_add_(0, owners[piece], states.to(sums.dtype))
        if not len(self.rows):
            return
        vectors = sums.index_select(0, ints[self.done]) / ints[self.num_summed].unsqueeze(1)
        vectors = self._with_scores(vectors, ints[self.classified], model)
        columns = torch.arange(vectors.shape[1], device=vectors.device)
        vectors.masked_fill_(columns >= ints[self.kept].unsqueeze(1), 0)
        lengths = vectors.norm(dim=1, keepdim=True).clamp_min_(_SMALLEST_LENGTH)
        is_normalized = ints[self.is_normalized].bool().unsqueeze(1)
        vectors.div_(lengths.where(is_normalized, torch.ones_like(lengths)))
        self.vectors.copy_(vectors.float(), non_blocking=True)

    def _with_scores(self, states: Tensor, classified: Tensor, model: DecoderModel) -> Tensor:
        """The states, with the scores of the labels in place of those that are classified."""
        vectors = F.pad(states, (0, self.vectors.shape[1] - states.shape[1]))
        if len(classified):
            assert model.classifier is not None
            scores = model.classifier(states.index_select(0, classified))
            vectors[classified, : scores.shape[1]] = scores
        return vectors

    def result(self) -> PooledResult:
        """The completed vectors; call it after the step is complete."""
        vectors: npt.NDArray[np.float32] = self.vectors.numpy()
        num_nans = np.count_nonzero(~np.isfinite(vectors), axis=1)
        is_good = num_nans == 0
        return PooledResult(
            rows=int32_array(self.rows[is_good]),
            vectors=tuple(
                vectors[index, : self.num_kept[index]] for index in np.flatnonzero(is_good)
            ),
            nan_rows=int32_array(self.rows[~is_good]),
            num_nans=int32_array(num_nans[~is_good]),
        )
