"""AWQ, GPTQ and auto-round: packed integers in groups of inputs."""

import re
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from longshore.worker.loading.module_names import ByModule, read_patterns
from longshore.worker.loading.quantisation_method import (
    SCALES,
    Module,
    Quantisation,
    ReadIntegers,
    packed_integers,
    reject_others,
    unsupported,
)
from longshore.worker.loading.quantised_tensor import Blocks, Numbers, QuantisedTensor
from longshore.worker.models.json_fields import JsonFields

_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq(Quantisation):
    """AutoAWQ's layout `gemm`: four bits in groups of inputs, with zero points."""

    method = "awq"
    ends: ClassVar = {".qweight": ".weight"}
    parts = (".qzeros", ".scales")
    unused = (".g_idx",)

    group_size: int | None

    @classmethod
    def read(cls, fields: JsonFields) -> "Awq":
        if "bits" not in fields.values and "w_bit" in fields.values:  # as in AutoAWQ's own file
            own = {"bits": "w_bit", "group_size": "q_group_size"}
            values = {key: fields.values.get(other) for key, other in own.items()}
            fields = JsonFields({**fields.values, **values}, fields.source)
        for key in ("version", "format", "checkpoint_format"):
            reject_others(fields, key, "gemm", "exllama", "ipex")
        reject_others(fields, "backend", "autoawq", "auto-round", "gptqmodel")
        if (bits := fields.integer("bits", 4)) != 4:
            raise unsupported(fields, "bits", bits, "4")
        return cls(_group_size(fields))

    def tensor(self, module: Module, end: str, integers: ReadIntegers) -> QuantisedTensor:
        inputs, words = module.matrix(end, ("I32",))
        shape = inputs, words * 8
        group = self.group_size or inputs
        grid = -(-inputs // group), shape[1]
        module.part(".qzeros", ("I32",), (grid[0], words))
        module.part(".scales", SCALES, grid)
        packed = replace(packed_integers(4, 1), order=_AWQ_ORDER)
        return QuantisedTensor(
            path=module.parts[end].path,
            numbers=replace(packed, name=module.name + end, shape=shape),
            scales=Blocks(Numbers(f"{module.name}.scales", grid), (group, 1)),
            zeros=Blocks(replace(packed, name=f"{module.name}.qzeros", shape=grid), (group, 1)),
            is_transposed=True,
        )


@dataclass(frozen=True)
class Gptq(Quantisation):
    """GPTQModel, AutoGPTQ, auto-round: groups of inputs, which `g_idx` gives for each input.

    is_less_one: zero points are stored minus one, in all formats but `gptq_v2`.
    dynamic: other settings of some modules; None: they are not quantised.
    """

    method = "gptq"
    ends: ClassVar = {".qweight": ".weight"}
    parts = (".qzeros", ".scales", ".g_idx")

    bits: int
    group_size: int | None
    is_less_one: bool
    dynamic: ByModule["Gptq | None"] = field(default_factory=ByModule)

    @classmethod
    def read(cls, fields: JsonFields) -> "Gptq":
        for key in ("checkpoint_format", "format"):
            reject_others(fields, key, "gptq", "gptq_v2")
        reject_others(fields, "pack_dtype", "int32")
        bits = fields.integer("bits")
        if bits not in (2, 3, 4, 8):
            raise unsupported(fields, "bits", bits, "2, 3, 4, 8")
        form = fields.text("checkpoint_format", fields.text("format", "gptq"))
        own = cls(bits, _group_size(fields), form != "gptq_v2")
        if "dynamic" not in fields.values:
            return own
        others = {
            key: None if key.startswith("-:") else cls.read(each)
            for key, each in _own_settings(fields, "dynamic").items()
        }
        texts = [(key.removeprefix("+:").removeprefix("-:"), each) for key, each in others.items()]
        return replace(own, dynamic=ByModule({}, read_patterns(fields, "dynamic", texts)))

    def tensor(self, module: Module, end: str, integers: ReadIntegers) -> QuantisedTensor:
        own = self.dynamic.of(module.name, self)
        if own is None:
            raise module.ignored(end)
        if own is not self:
            return own.tensor(module, end, integers)
        rows, columns = packed_integers(self.bits, 0), packed_integers(self.bits, 1)
        words, outputs = module.matrix(end, ("I32",))
        inputs = words * rows.period // rows.units
        group = self.group_size or inputs
        grid = -(-inputs // group), outputs
        if outputs % columns.period or words % rows.units:
            raise module.wrong(end, f"{self.bits} bits are packed in units of {rows.period}")
        zeros = columns.stored_size(outputs)
        module.part(".qzeros", ("I32",), (grid[0], zeros))
        module.part(".scales", SCALES, grid)
        has_groups = ".g_idx" in module.parts
        if has_groups:
            module.part(".g_idx", ("I32", "I64"), (inputs,))
        zero_points = replace(
            columns, name=f"{module.name}.qzeros", shape=grid, is_less_one=self.is_less_one
        )
        return QuantisedTensor(
            path=module.parts[end].path,
            numbers=replace(rows, name=module.name + end, shape=(inputs, outputs)),
            scales=Blocks(Numbers(f"{module.name}.scales", grid), (group, 1)),
            zeros=Blocks(zero_points, (group, 1)),
            is_transposed=True,
            groups=f"{module.name}.g_idx" if has_groups else None,
            groups_dim=0,
        )


@dataclass(frozen=True)
class AutoRound(Quantisation):
    """auto-round, in the layouts of GPTQ and AWQ.

    default: of modules of which `own` says nothing. None: they are not quantised.
    """

    method = "auto-round"
    ends: ClassVar = {".qweight": ".weight"}
    parts = Gptq.parts

    default: Gptq | Awq | None
    own: ByModule[Gptq | Awq | None]

    @classmethod
    def read(cls, fields: JsonFields) -> "AutoRound":
        exact, patterns = {}, []
        for name, settings in _own_settings(fields, "extra_config").items():
            layout = cls._layout(settings)
            if re.search(r"[*^$|()\[\]?+\\]", name) is None:
                exact[name] = layout
            else:  # its tool searches for the pattern
                found = name if name.startswith(".*") and "|" not in name else f".*?(?:{name})"
                patterns.append((found, layout))
        read = read_patterns(fields, "extra_config", patterns)
        return cls(cls._layout(fields), ByModule(exact, read))

    @staticmethod
    def _layout(fields: JsonFields) -> Gptq | Awq | None:
        if fields.integer("bits") >= 16:
            return None
        reject_others(fields, "data_type", "int")
        if (act_bits := fields.integer("act_bits", 16)) < 16:
            raise unsupported(fields, "act_bits", act_bits, "16")
        fields.reject_unless_neutral("rotation_config", {}, "rotated weights are not supported")
        form = fields.text("packing_format", "")
        if form == "auto_round:auto_awq":
            return Awq.read(fields)
        reject_others(fields, "packing_format", "auto_round:auto_gptq", "auto_round")
        return replace(Gptq.read(fields), is_less_one=form != "auto_round")

    def tensor(self, module: Module, end: str, integers: ReadIntegers) -> QuantisedTensor:
        layout = self.own.of(module.name, self.default)
        if layout is None:
            raise module.ignored(end)
        return layout.tensor(module, end, integers)


def _group_size(fields: JsonFields) -> int | None:
    """None: all inputs are one group."""
    return None if fields.values.get("group_size") == -1 else fields.integer("group_size", 128)


def _own_settings(fields: JsonFields, key: str) -> dict[str, JsonFields]:
    """The settings of some modules, where they differ from all others'."""
    table = fields.table(key)
    if table is None:
        return {}
    others = {other: value for other, value in fields.values.items() if other != key}
    found = {}
    for name in table.values:
        own = table.table(name)
        found[name] = JsonFields({**others, **({} if own is None else own.values)}, table.source)
    return found
