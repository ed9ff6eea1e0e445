"""FP8, MXFP8, MXFP4 and NVFP4 as DeepSeek, Qwen, OpenAI and NVIDIA publish them."""

from dataclasses import dataclass
from typing import ClassVar

from longshore.worker.loading.quantisation_method import (
    FP8,
    SCALES,
    Module,
    Quantisation,
    ReadIntegers,
    block_size,
    blocks_of_scales,
    reject_others,
)
from longshore.worker.loading.quantised_tensor import Blocks, Numbers, QuantisedTensor
from longshore.worker.models.json_fields import JsonFields


@dataclass(frozen=True)
class Fp8(Quantisation):
    """DeepSeek, Qwen, transformers: FP8 with a scale for each block of rows and columns. AutoFP8:
    with one for each tensor.

    block: rows and columns; None: there is one scale for a tensor, or one for each row.
    """

    method = "fp8"
    ends: ClassVar = {".weight": ".weight"}
    parts = (".weight_scale_inv", ".weight_scale")
    unused = (".input_scale", ".activation_scale")

    block: tuple[int, int] | None

    @classmethod
    def read(cls, fields: JsonFields) -> "Fp8":
        reject_others(fields, "fmt", "e4m3", "float8_e4m3fn")
        block = fields.values.get("weight_block_size")
        return cls(None if block is None else block_size(fields, "weight_block_size", block))

    def tensor(self, module: Module, end: str, integers: ReadIntegers) -> QuantisedTensor:
        shape = module.matrix(end, FP8)
        scale = next((part for part in self.parts if part in module.parts), self.parts[0])
        return QuantisedTensor(
            path=module.parts[end].path,
            numbers=Numbers(module.name + end, shape),
            scales=blocks_of_scales(module, scale, shape, self.block),
        )


@dataclass(frozen=True)
class Mxfp4(Quantisation):
    """GPT-OSS as published: all experts of a layer in one tensor, in blocks of 32 inputs."""

    method = "mxfp4"
    ends: ClassVar = {"_blocks": ""}
    parts = ("_scales",)

    @classmethod
    def read(cls, fields: JsonFields) -> "Mxfp4":
        return cls()

    def tensor(self, module: Module, end: str, integers: ReadIntegers) -> QuantisedTensor:
        found = module.part(end, ("U8",))
        if len(found.shape) != 4 or found.shape[-1] != 16:
            raise module.wrong(end, "must be (experts, outputs, blocks, 16)")
        experts, outputs, num_blocks, _ = found.shape
        module.part("_scales", ("U8", "F8_E8M0"), (experts, outputs, num_blocks))
        numbers = Numbers(
            module.name + end,
            (outputs, num_blocks * 32),
            num_dims=3,
            coding="fp4",
            period=32,
        )
        scales = Numbers(f"{module.name}_scales", (outputs, num_blocks), coding="exponent")
        return QuantisedTensor(
            path=found.path,
            numbers=numbers,
            scales=Blocks(scales, (1, 32)),
            leading=(experts,),
            is_transposed=True,
        )


@dataclass(frozen=True)
class ModelOpt(Quantisation):
    """NVIDIA's Model Optimizer: FP8 with a scale for each tensor or row, MXFP8 and NVFP4. Which one
    a module has, and whether it has one, the dtypes of its tensors say."""

    method = "modelopt"
    ends: ClassVar = {".weight": ".weight"}
    parts = (".weight_scale", ".weight_scale_2")
    unused = (".input_scale",)

    @classmethod
    def read(cls, fields: JsonFields) -> "ModelOpt":
        others = "fp8_per_channel_per_token", "mxfp8", "nvfp4", "w4a16_nvfp4"
        reject_others(fields, "quant_algo", "fp8", *others)
        return cls()

    def tensor(self, module: Module, end: str, integers: ReadIntegers) -> QuantisedTensor:
        name, path = module.name + end, module.parts[end].path
        rows, columns = module.matrix(end, (*FP8, "U8"))
        if module.parts[end].dtype != "U8":
            is_mx = module.part(".weight_scale", (*SCALES, "U8")).dtype == "U8"
            block = (1, 32) if is_mx else None
            scales = blocks_of_scales(module, ".weight_scale", (rows, columns), block)
            return QuantisedTensor(path=path, numbers=Numbers(name, (rows, columns)), scales=scales)
        grid = rows, -(-2 * columns // 16)
        module.part(".weight_scale", FP8, grid)
        module.part(".weight_scale_2", SCALES, (), (1,))
        return QuantisedTensor(
            path=path,
            numbers=Numbers(name, (rows, 2 * columns), coding="fp4", period=2),
            scales=Blocks(Numbers(f"{module.name}.weight_scale", grid), (1, 16)),
            factor=f"{module.name}.weight_scale_2",
        )
