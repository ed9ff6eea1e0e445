"""The cross-attention layer of an encoder-decoder model (Vaswani et al., 2017): projections around
an attention backend."""

from torch import Tensor

from longshore.worker.attention.backend import AttentionStep, EncodingStep
from longshore.worker.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors


class CrossAttention:
    """Decoder tokens attend to encoder tokens. Keys and values are computed once per request and
    cached. Queries, values and the output have biases, keys have none. Heads are divided among the
    shards.

    size: width of decoder and encoder tokens.
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
        """x: (n, size) -> the same shape. layer: its number in `attention`."""
        q = self.queries(x).view(len(x), -1, self._head_dim)
        return self.out(attention.forward(layer, q))

    def write_kv(self, encoded: Tensor, layer: int, row: int, attention: EncodingStep) -> None:
        """Write the keys and values of a row's encoder tokens. encoded: (num_tokens, size)."""
        heads = self.keys_values(encoded).view(len(encoded), -1, self._head_dim)
        attention.write(layer, row, *heads.chunk(2, dim=1))

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            **self.queries.checkpoint_tensors([f"{name}.q_proj"]),
            **self.keys_values.checkpoint_tensors([f"{name}.k_proj", f"{name}.v_proj"]),
            **self.out.checkpoint_tensors(f"{name}.out_proj"),
        }
