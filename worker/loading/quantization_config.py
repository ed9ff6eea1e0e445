"""`quantization_config` of config.json: which method it is.

The layouts of each are those of the tools that write them: compressed-tensors, AutoAWQ, GPTQModel,
auto-round, modelopt, transformers; `tests/worker/loading/quantised/` has a file of each.
"""

from collections.abc import Mapping
from typing import Final

from longshore.worker.errors import UnsupportedModel
from longshore.worker.loading.compressed_tensors import CompressedTensors
from longshore.worker.loading.grouped_integers import AutoRound, Awq, Gptq
from longshore.worker.loading.quantisation_method import Quantisation
from longshore.worker.loading.small_floats import Fp8, ModelOpt, Mxfp4
from longshore.worker.models.json_fields import JsonFields

KEYS: Final = ("quantization_config", "compression_config")
METHODS: Final[Mapping[str, type[Quantisation]]] = {
    each.method: each for each in (AutoRound, Awq, CompressedTensors, Fp8, Gptq, ModelOpt, Mxfp4)
}


def read_quantisation(fields: JsonFields) -> Quantisation | None:
    """How the weights of the model are quantised; None: they are floats. fields: of config.json.
    Raises UnsupportedModel for a method or setting that is not supported, and BrokenCheckpoint for
    an invalid one."""
    holder = _holder(fields)
    if holder is None:
        return None
    method = holder.text("quant_method", CompressedTensors.method)
    if "quant_method" not in holder.values and "config_groups" not in holder.values:
        raise UnsupportedModel(
            f"{holder.source} has no quant_method, so it does not say how the weights are "
            f"quantised. Supported: {', '.join(METHODS)}."
        )
    if method not in METHODS:
        raise UnsupportedModel(
            f"{holder.source}: quant_method={method!r} is not supported. Use a checkpoint in "
            f"bfloat16, float16 or float32, or one of {', '.join(METHODS)}."
        )
    return METHODS[method].read(holder)


def _holder(fields: JsonFields) -> JsonFields | None:
    for key in KEYS:
        found = fields.table(key)
        if found is not None:
            return found.table(KEYS[0]) or found  # as the first versions of compressed-tensors
    text = fields.table("text_config")
    if text is not None and text.values.keys() & set(KEYS):
        return _holder(text)
    own = fields.sibling_file("hf_quant_config.json")  # all that first versions of modelopt wrote
    found = None if own is None else own.table("quantization")
    if found is None:
        return None
    return JsonFields({**found.values, "quant_method": ModelOpt.method}, found.source)
