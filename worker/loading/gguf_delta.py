"""The rows of gated DeltaNet layers in GGUF files, in the order of Hugging Face checkpoints.

llama.cpp repeats key heads in turns, so its converter puts value heads in an order in which those
of one key head are not adjacent. The older architecture `qwen3next` keeps their order, but has
queries, keys, values and gates one after the other, which the checkpoint groups by key head.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np

from longshore.protocol.errors import shortened
from longshore.protocol.gguf_header import GgufTensor
from longshore.worker.loading.gguf_architecture import (
    DENSE,
    HEAD_NORMS,
    MLP_EXPERTS,
    Architecture,
    DeltaHeads,
    Heads,
    Make,
    as_recipe,
    convolution,
    log_of_negative,
    minus_one,
)
from longshore.worker.loading.gguf_recipes import (
    Recipe,
    below_each_other,
    plain,
    reordered,
    reshaped,
    with_values,
)


def delta_heads(metadata: Mapping[str, Any], name: str) -> DeltaHeads:
    def number(key: str) -> int:
        found = metadata.get(f"{name}.ssm.{key}")
        if type(found) is not int or found < 1:
            raise ValueError(f"ssm.{key}={shortened(repr(found))} is not a number above 0")
        return found

    num_keys, num_values = number("group_count"), number("time_step_rank")
    key_dim, inner = number("state_size"), number("inner_size")
    if num_values % num_keys or inner % num_values:
        raise ValueError(
            f"ssm.time_step_rank={num_values} is not a multiple of ssm.group_count={num_keys}, or "
            f"not a divisor of ssm.inner_size={inner}"
        )
    return DeltaHeads(num_keys, num_values, key_dim, inner // num_values)


def with_grouped_values(
    recipe: Recipe, heads: DeltaHeads, width: int, *, before: int = 0
) -> Recipe:
    """Value heads with one key head adjacent.

    width: rows of a value head. before: rows before the first one, which stay where they are.
    """
    _check_size(recipe, recipe.shape[0], before + heads.num_values * width)
    rows = before + _grouped(heads, width)
    return reordered(recipe, np.concatenate([np.arange(before), rows]))


def with_grouped_columns(recipe: Recipe, heads: DeltaHeads) -> Recipe:
    """The same for a matrix with a column for each element of value heads."""
    _check_size(recipe, recipe.shape[-1], heads.value_width)
    order = _grouped(heads, heads.value_dim)
    if (np.diff(order) == 1).all():
        return recipe
    return with_values(recipe, lambda values: values[:, order])


def grouped_by_keys(parts: list[Recipe], heads: DeltaHeads) -> Recipe:
    """Of each key head its query, its key, and the values and the gates of its value heads.

    parts: queries, keys and values one after the other; gates.
    """
    recipe = below_each_other(parts)
    keys, values = heads.key_width, heads.value_width
    _check_size(recipe, recipe.shape[0], 2 * (keys + values))
    rows = np.arange(recipe.shape[0])
    ends = np.cumsum([keys, keys, values])
    of_keys = [part.reshape(heads.num_keys, -1) for part in np.split(rows, ends)]
    return reordered(recipe, np.concatenate(of_keys, axis=1).flatten())


def _grouped(heads: DeltaHeads, width: int) -> np.ndarray:
    """The rows of value heads in the file, in the order of the model."""
    rows = np.arange(heads.num_values * width).reshape(-1, heads.num_keys, width)
    return rows.swapaxes(0, 1).flatten()


def _check_size(recipe: Recipe, size: int, wanted: int) -> None:
    if size != wanted:
        raise ValueError(
            f"{shortened(recipe.sources[0])} has {size:,} rows or columns of heads, but the "
            f"settings imply {wanted:,}"
        )


def _ordered(
    target: str, order: Callable[[Recipe, DeltaHeads], Recipe], *, shape: Make | None = None
) -> Make:
    """order: puts rows or columns in the order of the model. shape: what is done before."""

    def make(tensor: GgufTensor, heads: Heads) -> Iterable[tuple[str, Recipe]]:
        found = [("", plain(tensor))] if shape is None else shape(tensor, heads)
        return [(target, order(recipe, heads.delta)) for _, recipe in found]

    return make


def _row(tensor: GgufTensor) -> Recipe:
    return reshaped(tensor, (1, int(np.prod(tensor.shape, dtype=object))))


def _same(values: np.ndarray) -> np.ndarray:
    return values


def _values(recipe: Recipe, heads: DeltaHeads) -> Recipe:
    return with_grouped_values(recipe, heads, heads.value_dim)


def _after_keys(recipe: Recipe, heads: DeltaHeads) -> Recipe:
    """Values after queries and keys."""
    return with_grouped_values(recipe, heads, heads.value_dim, before=2 * heads.key_width)


def _value_heads(recipe: Recipe, heads: DeltaHeads) -> Recipe:
    """One number or row of each value head."""
    return with_grouped_values(recipe, heads, 1)


_DELTA: Final = {
    **DENSE,
    **HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_CONV: Final = as_recipe("linear_attn.conv1d.weight", convolution)
_DELTA_VALUES: Final = {"linear_attn.A_log": log_of_negative, "linear_attn.norm.weight": _same,
                        "norm.weight": minus_one}  # fmt: skip
_SHARED_EXPERT: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_MIXTURE: Final = {
    **MLP_EXPERTS,
    "ffn_gate_inp_shexp.weight": as_recipe("mlp.shared_expert_gate.weight", _row),
}
_GROUPED_VALUES: Final = {
    "attn_qkv.weight": _ordered("linear_attn.in_proj_qkv.weight", _after_keys),
    "attn_gate.weight": _ordered("linear_attn.in_proj_z.weight", _values),
    "ssm_conv1d.weight": _ordered("linear_attn.conv1d.weight", _after_keys, shape=_DELTA_CONV),
    "ssm_out.weight": _ordered("linear_attn.out_proj.weight", with_grouped_columns),
    "ssm_a": _ordered("linear_attn.A_log", _value_heads),
    "ssm_dt.bias": _ordered("linear_attn.dt_bias", _value_heads),
    "ssm_beta.weight": _ordered("linear_attn.in_proj_b.weight", _value_heads),
    "ssm_alpha.weight": _ordered("linear_attn.in_proj_a.weight", _value_heads),
}
QWEN35: Final = Architecture(_DELTA, made=_GROUPED_VALUES, changed=_DELTA_VALUES, has_delta=True)
QWEN35_MOE: Final = Architecture(
    {**_DELTA, **_SHARED_EXPERT},
    made=_GROUPED_VALUES | _SHARED_MIXTURE,
    changed=_DELTA_VALUES,
    has_delta=True,
)
QWEN3_NEXT: Final = Architecture(
    {**_DELTA, **_SHARED_EXPERT, "ssm_ba": "linear_attn.in_proj_ba"},
    made={**_SHARED_MIXTURE, "ssm_conv1d.weight": _DELTA_CONV},
    joined=(
        (
            "linear_attn.in_proj_qkvz.weight",
            ("attn_qkv.weight", "attn_gate.weight"),
            lambda parts, heads: grouped_by_keys(parts, heads.delta),
        ),
    ),
    changed=_DELTA_VALUES,
    has_delta=True,
)
