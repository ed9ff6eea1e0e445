"""Token embeddings and the output head, which may share a table; both are divided by tokens."""

from dataclasses import dataclass

from torch import Tensor

from longshore.worker.kernels.embedding import embed_part, look_up
from longshore.worker.kernels.logits import to_logits
from longshore.worker.layers.matrix import Matrix
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensor
from longshore.worker.ranks.parallel import Parallel


@dataclass(frozen=True)
class VocabShare:
    """The tokens of one shard. All shards have the same number of rows, so the last ones may have
    padding rows."""

    vocab_size: int
    num_rows: int
    first: int
    num_tokens: int

    @classmethod
    def of(cls, parallel: Parallel, vocab_size: int) -> "VocabShare":
        num_rows = -(-vocab_size // parallel.num_shards)
        first = min(vocab_size, parallel.shard * num_rows)
        return cls(vocab_size, num_rows, first, min(num_rows, vocab_size - first))

    def clear_padding(self, matrix: Matrix) -> None:
        """Padding rows are zero. matrix: before it is filled."""
        matrix.stored[self.num_tokens :].zero_()

    def stored(self, table: Tensor) -> StoredTensor:
        """The checkpoint's table, of which `table` holds this share."""
        part = (table[: self.num_tokens], (slice(self.first, self.first + self.num_tokens),))
        return StoredTensor((self.vocab_size, table.shape[1]), (part,))


class VocabParallelEmbedding:
    """matrix: (num_rows, hidden_size), a vector per token of this rank."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        self._parallel = placement.parallel
        self._share = VocabShare.of(placement.parallel, vocab_size)
        self.matrix = Matrix(
            self._share.num_rows, hidden_size, placement, is_table=True, is_multiplied=False
        )
        self._share.clear_padding(self.matrix)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: (n,) int32 or int64 -> (n, hidden_size)."""
        if self._parallel.num_shards == 1:
            return look_up(token_ids, self.matrix.table)
        share = self._share
        vectors = embed_part(token_ids, self.matrix.table, share.first, share.num_tokens)
        return self._parallel.all_reduce(vectors)

    @property
    def weight(self) -> Tensor:
        """The floats, unless the table is quantised."""
        return self.matrix.weight

    def stored(self) -> StoredTensor:
        return self._share.stored(self.matrix.stored)


class OutputHead:
    """Computes the logits. tied_to: the embeddings whose table it shares."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        placement: Placement,
        *,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        self._parallel = placement.parallel
        self._share = VocabShare.of(placement.parallel, vocab_size)
        self.is_tied = tied_to is not None
        if tied_to is None:
            self._matrix = Matrix(self._share.num_rows, hidden_size, placement)
            self._share.clear_padding(self._matrix)
        else:
            self._matrix = tied_to.matrix
            self._matrix.is_multiplied = True

    def __call__(self, hidden: Tensor, *, scale: float = 1.0, cap: float | None = None) -> Tensor:
        """hidden: (n, hidden_size) -> (n, vocab_size) float32, over all shards. scale, cap: see
        `to_logits`."""
        products = self._parallel.all_gather(self._matrix.product(hidden))
        return to_logits(products, self._share.vocab_size, scale=scale, cap=cap)

    def stored(self) -> StoredTensor:
        return self._share.stored(self._matrix.stored)
