"""Attention of a decoder's tokens to those of an encoder (Vaswani et al., 2017), all but the
attention itself."""

from torch import Tensor

from longshore.worker.attention.backend import AttentionStep, EncodingStep
from longshore.worker.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors


class CrossAttention:
    """Keys and values are made of the encoder's tokens once per request and kept; queries, values
    and the result have biases, keys have none. Heads are cut among the shards.

    size: of decoder and encoder tokens, all heads together.
    """

    def __init__(self, size: int, num_heads: int, placement: Placement) -> None:
        self._head_dim = size // num_heads
        heads = Columns.of_heads(placement.parallel.share(num_heads), num_heads, self._head_dim)
        self.queries = ColumnParallelLinear(size, (heads,), bias=True, placement=placement)
        self.keys_values = ColumnParallelLinear(
            size, (heads, heads), bias=(False, True), placement=placement
        )
        self.out = RowParallelLinear(size, size, bias=True, placement=placement)

    def __call__(self, x: Tensor, layer: int, attention: AttentionStep) -> Tensor:
        """x: (n, size) -> the same shape. layer: as `attention` numbers it."""
        q = self.queries(x).view(len(x), -1, self._head_dim)
        return self.out(attention.forward(layer, q))

    def keep(self, encoded: Tensor, layer: int, row: int, attention: EncodingStep) -> None:
        """Put down what the tokens of a row attend to. encoded: (num_tokens, size)."""
        heads = self.keys_values(encoded).view(len(encoded), -1, self._head_dim)
        attention.write(layer, row, *heads.chunk(2, dim=1))

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            **self.queries.checkpoint_tensors([f"{name}.q_proj"]),
            **self.keys_values.checkpoint_tensors([f"{name}.k_proj", f"{name}.v_proj"]),
            **self.out.checkpoint_tensors(f"{name}.out_proj"),
        }
