"""Makes the folders beside this file: tiny random models, packed by the tools that write such
checkpoints, each with the values that its tool gives back, in float64 (`reference.npz`).

Run with the tools installed without their dependencies, beside torch and transformers:

    pip install --no-deps compressed-tensors==0.20.1 gptqmodel==7.7.0 autoawq==0.2.9 loguru \
        device-smi tokenicer logbar pypcre defuser threadpoolctl
    python -m tests.worker.loading.quantised.make [PART OF A NAME ...]
    pip install --no-deps compressed-tensors==0.12.2  # the last one that writes groups by g_idx
    python -m tests.worker.loading.quantised.make ct_int4_actorder
    pip install --no-deps auto-round==0.16.1 datasets dill multiprocess pandas py-cpuinfo
    python -m tests.worker.loading.quantised.make auto_round
    pip install --no-deps nvidia-modelopt==0.47.0 nvidia-ml-py omegaconf pulp scipy \
        antlr4-python3-runtime==4.9.3
    python -m tests.worker.loading.quantised.make modelopt
"""

import importlib.util
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import make_tiny_model

HERE = Path(__file__).parent
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
DELTA = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "phi3": ("Phi3", {"head_dim": None}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "qwen3_next": ("Qwen3Next", EXPERTS | DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", EXPERTS | DELTA),
    "lfm2_moe": (
        "Lfm2Moe",
        EXPERTS
        | {
            "head_dim": None,
            "num_hidden_layers": 2,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 16, "mamba_d_state": 8, "ssm_in_multiplier": 1.25},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "num_hidden_layers": None,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 16,
            "mamba_head_dim": 2,
            "n_groups": 1,
            "ssm_state_size": 8,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "moe_latent_size": 16,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "gpt_oss": ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "deepseek": (
        "DeepseekV3",
        {
            "head_dim": None,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "num_nextn_predict_layers": 0,
        },
    ),
}
Quantise = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""A matrix (outputs, inputs) -> what is stored for it, by ends of names, and its values."""


def make(case: str, family: str, quantise: Quantise, settings: dict[str, Any]) -> None:
    folder = HERE / f"{family}-{case}"
    if not any(word in folder.name for word in sys.argv[1:] or ("",)):
        return
    torch.manual_seed(0)
    shutil.rmtree(folder, ignore_errors=True)
    name, sizes = FAMILIES[family]
    settled = {key: value for key, value in (SIZES | sizes).items() if value is not None}
    make_tiny_model(name, folder, **settled)
    stored, reference = {}, {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        module, _, end = key.rpartition(".")
        if end in ("gate_up_proj", "down_proj"):  # of all experts: (experts, inputs, outputs)
            made = [quantise(matrix.t().contiguous()) for matrix in tensor]
            for part in made[0][0]:
                stored[key + part] = torch.stack([parts[part] for parts, _ in made])
            reference[key] = torch.stack([values.t() for _, values in made])
        elif end == "weight" and tensor.dim() == 2 and is_linear(module) and family != "gpt_oss":
            parts, values = quantise(tensor)
            stored |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
            reference[key] = values
        else:
            stored[key] = tensor.to(torch.bfloat16)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "reference.npz", **{k: v.numpy() for k, v in reference.items()})


def is_linear(module: str) -> bool:
    of_gates = ".gate", ".router", "_expert_gate", "in_proj_ba", "in_proj_a", "in_proj_b"
    return not module.endswith(("lm_head", "embed_tokens", "embeddings", "norm", *of_gates))


def compressed_tensors(
    form: str, *, divisor: bool = False, **weights: Any
) -> tuple[Quantise, dict[str, Any]]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)

    def extremes(matrix: Tensor) -> tuple[Tensor, Tensor]:
        if args.strategy == "tensor":
            return matrix.min().reshape(1), matrix.max().reshape(1)
        if args.strategy == "channel":
            return matrix.amin(1, keepdim=True), matrix.amax(1, keepdim=True)
        if args.strategy == "block":
            high, wide = args.block_structure
            blocks = [[block for block in row.split(wide, 1)] for row in matrix.split(high, 0)]
            return tuple(
                torch.tensor([[float(of(block)) for block in row] for row in blocks])
                for of in (torch.min, torch.max)
            )
        groups = matrix.unflatten(1, (-1, args.group_size))
        return groups.amin(2), groups.amax(2)

    def quantise(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        low, high = extremes(matrix)
        whole = generate_gparam(matrix.min(), matrix.max()).reshape(1) if divisor else None
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        state = {"weight": matrix, "weight_scale": scale, "weight_zero_point": zero}
        if whole is not None:
            state["weight_global_scale"] = whole
        if args.symmetric:
            del state["weight_zero_point"]
        stored = compressor.compress(state, scheme)
        double = {**stored, "weight_scale": stored["weight_scale"]}
        if args.type == "float" and args.num_bits == 4:
            packed, scales = stored["weight_packed"], stored["weight_scale"]
            exponents = scales.to(torch.int32) - 127
            factors = scales.double() if divisor else 2.0 ** exponents.double()
            values = dequantize(
                unpack_fp4_from_uint8(packed, *matrix.shape, dtype=torch.float64),
                factors,
                args=args,
                dtype=torch.float64,
                global_scale=None if whole is None else whole.double(),
            )
        elif form == "mxfp8-quantized":
            factors = 2.0 ** (stored["weight_scale"].to(torch.int32) - 127).double()
            values = dequantize(stored["weight"], factors, args=args, dtype=torch.float64)
        else:
            double["weight_scale"] = stored["weight_scale"].double()
            values = compressor.decompress(double, scheme)["weight"]
        assert (values - matrix).abs().max() < matrix.abs().max(), "not the same matrix"
        return stored, values

    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form,
        ignore=["lm_head"],
        quantization_status="compressed",
    )
    return quantise, json.loads(config.model_dump_json())


def actorder() -> tuple[Quantise, dict[str, Any]]:
    """Needs an old compressed-tensors, which does not read zero points that it has packed."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=4, strategy="group", group_size=16, actorder="group")
    compressor = PackedQuantizationCompressor()

    def quantise(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        order = torch.randperm(matrix.shape[1])
        groups = torch.empty_like(order).index_copy_(
            0, order, torch.arange(len(order)) // args.group_size
        )
        ordered = matrix[:, order].unflatten(1, (-1, args.group_size))
        scale, zero = calculate_qparams(ordered.amin(2), ordered.amax(2), args)
        index = groups.to(torch.int32)
        stored = compressor.compress_weight(
            weight=matrix, scale=scale, zero_point=zero, g_idx=index, quantization_args=args
        )
        stored |= {"weight_scale": scale, "weight_g_idx": index}
        double = {**stored, "weight_scale": scale.double()}
        values = compressor.decompress_weight(double, quantization_args=args)
        return stored, values

    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized",
        ignore=["lm_head"],
        quantization_status="compressed",
    )
    return quantise, json.loads(config.model_dump_json())


def fp8(block: tuple[int, int] | None) -> tuple[Quantise, dict[str, Any]]:
    """transformers, in the layout of DeepSeek."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize, _dequantize_fp8_weight

    config = FineGrainedFP8Config(weight_block_size=block, modules_to_not_convert=["lm_head"])

    class Quantiser:
        quantization_config = config

    def quantise(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        made = Fp8Quantize(Quantiser()).convert({"x.weight": matrix})
        stored = {key.removeprefix("x."): each for key, each in made.items()}
        scale = stored["weight_scale_inv"]
        if block is None:
            stored["weight_scale_inv"] = scale = scale.reshape(())
        values = _dequantize_fp8_weight(
            stored["weight"], scale, None if block is None else list(block), torch.float64
        )
        return stored, values

    return quantise, config.to_dict()


def awq(group_size: int) -> tuple[Quantise, dict[str, Any]]:
    packing = from_file("awq.utils.packing_utils")
    sys.modules["awq.utils.packing_utils"] = packing
    gemm = from_file("awq.modules.linear.gemm")

    def quantise(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = matrix.unflatten(1, (-1, group_size))
        low, high = groups.amin(2), groups.amax(2)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round().clamp(0, 15)
        linear = torch.nn.Linear(*matrix.t().shape, bias=False)
        linear.weight.data = (
            (matrix.unflatten(1, (-1, group_size)) / scales[..., None])
            .round()
            .clamp(-zeros[..., None], 15 - zeros[..., None])
            * scales[..., None]
        ).flatten(1)  # as AutoAWQ's pseudo_quantize
        packed = gemm.WQLinear_GEMM.from_linear(
            linear, 4, group_size, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        stored = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales")}
        values = packing.dequantize_gemm(
            stored["qweight"], stored["qzeros"], stored["scales"].double(), 4, group_size
        )
        return stored, values.t().contiguous()

    settings = {
        "bits": 4,
        "group_size": group_size,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }
    return quantise, settings


def gptq(
    bits: int, group_size: int, *, sym: bool, desc_act: bool, version: int = 1
) -> tuple[Quantise, dict[str, Any]]:
    os.environ["GPTQMODEL_DISABLE_PACK_EXT"] = "1"  # takes minutes to compile
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    form = "gptq" if version == 1 else "gptq_v2"
    config = QuantizeConfig(
        bits=bits, group_size=group_size, sym=sym, desc_act=desc_act, format=form
    )
    top = (1 << bits) - 1

    def quantise(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = matrix.shape
        size = inputs if group_size == -1 else group_size
        order = torch.randperm(inputs) if desc_act else torch.arange(inputs)
        index = torch.empty_like(order).index_copy_(0, order, torch.arange(inputs) // size)
        ordered = matrix[:, order].unflatten(1, (-1, size))
        low, high = ordered.amin(2), ordered.amax(2)
        if sym:
            high = torch.maximum(high, -low)
            low = -high
        scales = ((high - low) / top).half().float()
        middle = torch.full_like(low, (top + 1) // 2)
        # Minus one must not be below zero in the first version of the format.
        zeros = middle if sym else (-low / scales).round().clamp(1, top)
        numbers = (matrix / scales[:, index]).round() + zeros[:, index]
        rounded = (numbers.clamp(0, top) - zeros[:, index]) * scales[:, index]
        linear = torch.nn.Linear(inputs, outputs, bias=False)
        linear.weight.data = rounded
        packed = TorchLinear(
            bits=bits,
            group_size=group_size,
            sym=sym,
            desc_act=desc_act,
            in_features=inputs,
            out_features=outputs,
            bias=False,
        )
        packed.pack(linear, scales, zeros.to(torch.int32), index.to(torch.int32))
        packed._init_wf_unsqueeze_buffers()  # the rest of post_init compiles
        halves = packed.scales
        packed.scales = halves.double()
        values = packed.dequantize_weight().t().contiguous()
        packed.scales = halves
        if version == 1:
            convert_gptq_v2_to_v1_format_module(packed, config)
        names = ("qweight", "qzeros", "scales", "g_idx")
        assert (values - rounded).abs().max() < 1e-3 * rounded.abs().max()
        return {key: getattr(packed, key).clone() for key in names}, values

    settings = json.loads(json.dumps(config.to_dict(), default=str))
    del settings["meta"]  # has a path of this machine
    return quantise, settings


def make_with_auto_round(
    case: str, form: str, own: dict[str, dict[str, Any]], **scheme: Any
) -> None:
    """The tool also writes config.json. own: settings of some modules."""
    from auto_round import AutoRound
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch.qlinear_torch import QuantLinear as Plain
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as LessOne
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = HERE / f"llama-{case}"
    torch.manual_seed(0)
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        make_tiny_model("Llama", Path(name), **SIZES)
        originals = load_file(Path(name) / "model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(name)
        texts = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=texts, pad_token="a", eos_token="b")
        tool = AutoRound(
            model,
            tokenizer,
            **{"bits": 4, "group_size": 16, "iters": 0, "device_map": "cpu", "layer_config": own},
            disable_opt_rtn=True,
            **scheme,
        )
        tool.quantize_and_save(f"{name}/made", format=form)
        (config,) = Path(name).glob("made/*/config.json")
        folder.mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copy(config.with_name(file), folder)
    tensors = load_file(folder / "model.safetensors")
    reference = {}
    for key in tensors:
        module, _, end = key.rpartition(".")
        if end != "qweight":
            continue
        words, zeros, scales = (tensors[f"{module}.{e}"] for e in ("qweight", "qzeros", "scales"))
        outputs = scales.shape[1]
        if "awq" in form:
            size = len(words) // len(scales)
            values = dequantize_gemm(words, zeros, scales.double(), 4, size)
        else:
            bits = zeros.shape[1] * 32 // outputs
            inputs = len(words) * 32 // bits
            kind = Plain if form == "auto_round" and not scheme["sym"] else LessOne
            linear = kind(bits, inputs // len(scales), inputs, outputs, bias=False)
            linear.qweight, linear.qzeros, linear.scales = words, zeros, scales.double()
            values = linear(torch.eye(inputs, dtype=torch.float64))
        original = originals[f"{module}.weight"].t()
        assert (values - original).abs().max() < original.abs().max(), "not the same matrix"
        reference[f"{module}.weight"] = values.t().contiguous().numpy()
    np.savez_compressed(folder / "reference.npz", **reference)


def make_with_modelopt(case: str, settings: str, family: str = "llama", **sizes: int) -> None:
    """The tool also writes config.json, and hf_quant_config.json."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
    from transformers import AutoModelForCausalLM

    folder = HERE / f"{family}-{case}"
    name_of_family, own = FAMILIES[family]
    torch.manual_seed(0)
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        make_tiny_model(name_of_family, Path(name), **(SIZES | own | sizes))
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        prompt = torch.arange(16).unsqueeze(0)
        model = mtq.quantize(model, getattr(mtq, settings), lambda model: model(prompt))
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=folder)
        originals = load_file(Path(name) / "model.safetensors")
    (folder / "generation_config.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    reference = {}
    for key in tensors:
        if not key.endswith(".weight_scale"):
            continue
        weight = key.removesuffix("_scale")
        original, scale = originals[weight], tensors[key].double()
        if tensors[weight].dtype == torch.uint8:
            packed = NVFP4QTensor(original.shape, torch.float64, tensors[weight])
            whole = tensors[f"{key}_2"].double()
            values = packed.dequantize(scale=scale, double_scale=whole, block_sizes={-1: 16})
        elif tensors[key].dtype == torch.uint8:
            packed = MXFP8QTensor(original.shape, torch.float64, tensors[weight])
            values = packed.dequantize(scale=tensors[key])
        else:
            packed = FP8QTensor(original.shape, torch.float64, tensors[weight])
            values = packed.dequantize(scale=scale if scale.dim() == 0 else scale[:, None])
        assert (values - original).abs().max() < original.abs().max(), "not the same matrix"
        reference[weight] = values.numpy()
    np.savez_compressed(folder / "reference.npz", **reference)


def mxfp4() -> tuple[Quantise, dict[str, Any]]:
    """compressed-tensors packs, in GPT-OSS's names and shapes; transformers reads."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    pack, _ = compressed_tensors(
        "mxfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype=torch.uint8,
    )

    def quantise(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        made, _ = pack(matrix)
        blocks = made["weight_packed"].unflatten(1, (-1, 16))
        scales = made["weight_scale"]
        values = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float64)
        return {"_blocks": blocks, "_scales": scales}, values[0].t().contiguous()

    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    return quantise, {"modules_to_not_convert": names, "quant_method": "mxfp4"}


def from_file(name: str) -> Any:
    """A module of AutoAWQ, without its package, which needs an old transformers."""
    for parent in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
        sys.modules.setdefault(parent, type(sys)(parent))
    sys.modules["awq.utils.module"] = type(sys)("awq.utils.module")
    sys.modules["awq.utils.module"].try_import = lambda name: (None, "")
    sys.modules["awq.utils.utils"] = type(sys)("awq.utils.utils")
    sys.modules["awq.utils.utils"].get_best_device = lambda: "cpu"
    path = next(
        Path(each) / f"{name.replace('.', '/')}.py"
        for each in sys.path
        if (Path(each) / f"{name.replace('.', '/')}.py").is_file()
    )
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float"}


def main() -> None:
    if "auto_round" in sys.argv:
        own = {
            "self_attn.v_proj": {"bits": 8, "group_size": 32},
            "o_proj": {"bits": 16},
            "model.layers.0.mlp.up_proj": {"bits": 2, "group_size": 32},
        }
        make_with_auto_round("auto_round", "auto_round", own, sym=True)
        make_with_auto_round("auto_round_asym", "auto_round", own, sym=False)
        awq = {"o_proj": {"bits": 16}, "v_proj": {"group_size": 32}}
        make_with_auto_round("auto_round_awq", "auto_round:auto_awq", awq, sym=False)
        make_with_auto_round("gptq_dynamic", "auto_gptq", own, sym=False)
        return
    if "modelopt" in sys.argv:
        make_with_modelopt("modelopt_fp8", "FP8_DEFAULT_CFG")
        make_with_modelopt("modelopt_fp8_rows", "FP8_PER_CHANNEL_PER_TOKEN_CFG")
        make_with_modelopt("modelopt_mxfp8", "MXFP8_DEFAULT_CFG")
        make_with_modelopt("modelopt_mlp", "NVFP4_MLP_ONLY_CFG")
        # llama.cpp's converter needs blocks of 64 inputs: `tests/gguf/nvfp4*` are made of these.
        make_with_modelopt("modelopt_nvfp4", "NVFP4_DEFAULT_CFG", hidden_size=64)
        experts = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
        make_with_modelopt("modelopt_nvfp4", "NVFP4_DEFAULT_CFG", "qwen3_moe", **experts)
        make_with_modelopt("modelopt_w4a16_nvfp4", "W4A16_NVFP4_CFG")
        return
    if "ct_int4_actorder" in sys.argv:
        make("ct_int4_actorder", "llama", *actorder())
        return
    of_ct = {
        "ct_int4": ("pack-quantized", GROUPS),
        "ct_int4_asym": ("pack-quantized", {**GROUPS, "symmetric": False}),
        "ct_int4_channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
        "ct_int8_packed": ("pack-quantized", {**GROUPS, "num_bits": 8}),
        "ct_int8": ("int-quantized", {"strategy": "channel"}),
        "ct_int8_asym": ("naive-quantized", {"strategy": "channel", "symmetric": False}),
        "ct_fp8_tensor": ("naive-quantized", {**FP8, "strategy": "tensor"}),
        "ct_fp8_channel": ("float-quantized", {**FP8, "strategy": "channel"}),
        "ct_fp8_block": (
            "float-quantized",
            {**FP8, "strategy": "block", "block_structure": [48, 24]},
        ),
        "ct_mxfp8": (
            "mxfp8-quantized",
            {**FP8, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        ),
        "ct_mxfp4": (
            "mxfp4-pack-quantized",
            {**GROUPS, "type": "float", "group_size": 32, "scale_dtype": torch.uint8},
        ),
    }
    nvfp4 = {
        **GROUPS,
        "type": "float",
        "strategy": "tensor_group",
        "scale_dtype": torch.float8_e4m3fn,
    }
    for case, (form, weights) in of_ct.items():
        make(case, "llama", *compressed_tensors(form, **weights))
    make("ct_nvfp4", "llama", *compressed_tensors("nvfp4-pack-quantized", divisor=True, **nvfp4))
    for family in ("phi3", "qwen3_moe", "mixtral"):
        make("ct_int4", family, *compressed_tensors("pack-quantized", **GROUPS))
    make("fp8_tensor", "llama", *fp8(None))
    of_fp8 = ("llama", "qwen3_moe", "deepseek", "qwen3_next", "qwen3_5_moe")
    for family in (*of_fp8, "lfm2_moe", "falcon_h1", "nemotron_h"):
        make("fp8_block", family, *fp8((16, 8)))
    for family in ("llama", "qwen3_moe"):
        make("awq", family, *awq(16))
        make("gptq", family, *gptq(4, 16, sym=True, desc_act=False))
    make("gptq_asym_actorder", "llama", *gptq(4, 16, sym=False, desc_act=True))
    make("gptq_v2", "llama", *gptq(4, 16, sym=False, desc_act=False, version=2))
    make("gptq_actorder", "phi3", *gptq(4, 16, sym=True, desc_act=True))
    make("gptq_2bit", "llama", *gptq(2, 16, sym=False, desc_act=False))
    make("gptq_3bit", "llama", *gptq(3, 32, sym=False, desc_act=False))
    make("gptq_8bit", "llama", *gptq(8, -1, sym=False, desc_act=False))
    make("mxfp4", "gpt_oss", *mxfp4())


if __name__ == "__main__":
    main()
