"""compressed-tensors, as llm-compressor and others write it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from longshore.protocol.errors import shortened
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.loading.module_names import ByModule, read_patterns
from longshore.worker.loading.quantisation_method import (
    FP8,
    SCALES,
    Module,
    Quantisation,
    ReadIntegers,
    block_size,
    blocks_of_scales,
    packed_integers,
    reject_others,
    unsupported,
)
from longshore.worker.loading.quantised_tensor import Blocks, Numbers, QuantisedTensor
from longshore.worker.models.json_fields import JsonFields

T = TypeVar("T")


@dataclass(frozen=True)
class Scheme:
    """How compressed-tensors stores the weights of some modules.

    block:   rows and columns that have one scale; None: all. A row or column number of 0 is all.
    """

    is_float: bool
    bits: int
    block: tuple[int, int]
    has_zeros: bool


@dataclass(frozen=True)
class CompressedTensors(Quantisation):
    """llm-compressor and others: integers and floats of 4 or 8 bits, per module."""

    method = "compressed-tensors"
    ends: ClassVar = {".weight_packed": ".weight", ".weight": ".weight"}
    parts = (
        ".weight_scale",
        ".weight_zero_point",
        ".weight_shape",
        ".weight_g_idx",
        ".weight_global_scale",
    )
    unused = (
        ".input_scale",
        ".input_zero_point",
        ".input_global_scale",
        ".output_scale",
        ".output_zero_point",
    )

    source: str
    schemes: tuple[Scheme, ...]
    targets: ByModule[Scheme | None]
    ignored: ByModule[bool]

    @classmethod
    def read(cls, fields: JsonFields) -> "CompressedTensors":
        for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
            found = fields.table(key)
            if found is not None and found.values.get("format") != "dense" and found.values:
                raise UnsupportedModel(
                    f"{found.source}: {shortened(str(found.values))} is not supported. Use a "
                    f"checkpoint without {key}."
                )
        groups = fields.table("config_groups")
        if groups is None or not groups.values:
            raise fields.wrong("config_groups", "an object with the groups of modules")
        _check_format(fields)
        schemes = []
        targets: list[tuple[str, Scheme | None]] = []
        for name in groups.values:
            group = groups.table(name)
            if group is None:
                raise groups.wrong(name, "an object")
            _check_format(group)
            weights = group.table("weights")
            if weights is not None:
                schemes.append(_read_scheme(weights))
                targets += [(text, schemes[-1]) for text in _texts(group, "targets")]
        ignored = [(text, True) for text in _texts(fields, "ignore")]
        return cls(
            fields.source,
            tuple(schemes),
            _by_module(fields, "config_groups", targets),
            _by_module(fields, "ignore", ignored),
        )

    def tensor(self, module: Module, end: str, integers: ReadIntegers) -> QuantisedTensor:
        if self.ignored.of(module.name, False):
            raise module.ignored(end)
        scheme = self._scheme_of(module)
        numbers = (
            self._packed(module, end, scheme, integers)
            if end == ".weight_packed"
            else self._plain(module, end, scheme)
        )
        rows, columns = numbers.shape
        block = scheme.block[0] or rows, scheme.block[1] or columns
        has_divisor = ".weight_global_scale" in module.parts
        if scheme.is_float and scheme.bits == 4:
            scales = self._fp4_scales(module, numbers.shape, block)
        else:
            scales = blocks_of_scales(module, ".weight_scale", numbers.shape, block)
        zeros = self._zeros(module, scheme, scales, is_packed=end == ".weight_packed")
        has_groups = ".weight_g_idx" in module.parts
        if has_groups:
            module.part(".weight_g_idx", ("I32", "I64"), (columns,))
        return QuantisedTensor(
            path=module.parts[end].path,
            numbers=numbers,
            scales=scales,
            zeros=zeros,
            divisor=f"{module.name}.weight_global_scale" if has_divisor else None,
            groups=f"{module.name}.weight_g_idx" if has_groups else None,
        )

    def _scheme_of(self, module: Module) -> Scheme:
        # Classes are not in the files; all quantised modules but embeddings are linear layers.
        kind = "Embedding" if "embed" in module.name.rpartition(".")[2] else "Linear"
        alike = self.schemes[0] if len(set(self.schemes)) == 1 else None
        found = self.targets.of(module.name, self.targets.exact.get(kind, alike))
        if found is None:
            raise BrokenCheckpoint(
                f"{self.source}: no group of config_groups has the target "
                f"{shortened(module.name)}, which is quantised. Weights and config.json belong to "
                "different models."
            )
        return found

    def _plain(self, module: Module, end: str, scheme: Scheme) -> Numbers:
        if scheme.bits != 8:
            raise module.wrong(end, f"config_groups has {scheme.bits} bits for it")
        return Numbers(module.name + end, module.matrix(end, FP8 if scheme.is_float else ("I8",)))

    def _packed(self, module: Module, end: str, scheme: Scheme, integers: ReadIntegers) -> Numbers:
        name = module.name + end
        if scheme.is_float:
            if scheme.bits != 4:
                raise module.wrong(end, "config_groups has floats of 8 bits for it")
            rows, num_bytes = module.matrix(end, ("U8",))
            return Numbers(name, (rows, 2 * num_bytes), coding="fp4", period=2)
        rows, words = module.matrix(end, ("I32",))
        module.part(".weight_shape", ("I64", "I32"), (2,))
        packed = replace(packed_integers(scheme.bits, 1), name=name, offset=-(1 << scheme.bits - 1))
        shape = integers(f"{module.name}.weight_shape")
        if shape[0] != rows or packed.stored_size(shape[1]) != words:
            raise module.wrong(end, f"weight_shape is {shape}, packed in {scheme.bits} bits")
        return replace(packed, shape=(rows, shape[1]))

    def _fp4_scales(self, module: Module, shape: tuple[int, int], block: tuple[int, int]) -> Blocks:
        """NVFP4 has groups of 16 and a scale of scales, MXFP4 groups of 32."""
        grid = shape[0], -(-shape[1] // block[1])
        name = f"{module.name}.weight_scale"
        if ".weight_global_scale" not in module.parts:
            module.part(".weight_scale", ("U8", "F8_E8M0"), grid)
            return Blocks(Numbers(name, grid, coding="exponent"), block)
        module.part(".weight_global_scale", SCALES, (), (1,))
        module.part(".weight_scale", (*FP8, *SCALES), grid)
        return Blocks(Numbers(name, grid), block)

    def _zeros(
        self, module: Module, scheme: Scheme, scales: Blocks, *, is_packed: bool
    ) -> Blocks | None:
        end = ".weight_zero_point"
        if end not in module.parts and not scheme.has_zeros:
            return None
        name, grid = module.name + end, scales.numbers.shape
        if is_packed and module.part(end, ("I32", "I8")).dtype == "I32":
            packed = packed_integers(scheme.bits, 0)
            module.part(end, ("I32",), (packed.stored_size(grid[0]), grid[1]))
            packed = replace(packed, name=name, shape=grid, offset=-(1 << scheme.bits - 1))
            return Blocks(packed, scales.block)
        dtypes = (*FP8, *SCALES) if scheme.is_float else ("I8",)
        stored = module.part(".weight_scale", (*SCALES, *FP8, "U8", "F8_E8M0")).shape
        module.part(end, dtypes, stored)
        return Blocks(replace(scales.numbers, name=name, coding="plain"), scales.block)


def _read_scheme(weights: JsonFields) -> Scheme:
    kind, bits = weights.text("type", "int"), weights.integer("num_bits", 8)
    if kind not in ("int", "float") or bits not in ((2, 4, 8) if kind == "int" else (4, 8)):
        raise UnsupportedModel(
            f"{weights.source}: type={kind!r} with num_bits={bits} is not supported. Supported: "
            "int with 2, 4 or 8, and float with 4 or 8."
        )
    strategy = weights.text("strategy", "tensor")
    block = (0, 0)
    if strategy == "channel":
        block = (1, 0)
    elif strategy in ("group", "tensor_group"):
        block = (1, weights.integer("group_size"))
    elif strategy == "block":
        block = block_size(weights, "block_structure", weights.values.get("block_structure"))
    elif strategy != "tensor":
        raise unsupported(
            weights, "strategy", strategy, "tensor, channel, group, tensor_group, block"
        )
    return Scheme(
        is_float=kind == "float",
        bits=bits,
        block=block,
        has_zeros=not weights.boolean("symmetric", True),
    )


def _check_format(fields: JsonFields) -> None:
    reject_others(
        fields,
        "format",
        "dense",
        "float-quantized",
        "int-quantized",
        "mixed-precision",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "pack-quantized",
    )


def _texts(fields: JsonFields, key: str) -> tuple[str, ...]:
    values = fields.values.get(key)
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise fields.wrong(key, "a list of names")
    return tuple(values)


def _by_module(fields: JsonFields, key: str, said: Sequence[tuple[str, T]]) -> ByModule[T]:
    """said: of names of modules, patterns of names after `re:`, or classes."""
    exact = {text: value for text, value in reversed(said) if not text.startswith("re:")}
    patterns = [(text[3:], value) for text, value in said if text.startswith("re:")]
    return ByModule(exact, read_patterns(fields, key, patterns))
