"""Quantises the linear layers of a checkpoint, in the layout of compressed-tensors.

Numbers are rounded to the nearest. The scale of a group is the one of a few below its largest
value with the smallest squared error, so a rare large weight does not take all steps.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from longshore.worker.errors import UnsupportedModel
from longshore.worker.loading.checkpoint import match_checkpoint
from longshore.worker.loading.loader import Memories
from longshore.worker.loading.safetensors_files import SafetensorsFiles
from longshore.worker.loading.stored_weights import StoredWeights
from longshore.worker.loading.tensor_names import EMBEDDINGS, HEAD, INDEX_FILE
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.registry import MODELS

Kind: TypeAlias = Literal["int8", "int4", "fp8"]

_SHRUNK: Final = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Of the largest value: what the highest number stands for."""
_FP8_MAX: Final = 448.0
_HEAD_MODULE: Final = "lm_head"  # a linear layer for other readers, also where it is tied


@dataclass(frozen=True)
class Scheme:
    """kind: int8 and fp8 have a scale for each row, int4 for each `group` inputs of it."""

    kind: Kind
    group: int = 128

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """`quantization_config`."""
        weights: dict[str, Any] = {"symmetric": True, "dynamic": False, "observer": "mse"}
        activations = None
        if self.kind == "fp8":
            form = "float-quantized"
            weights |= {"type": "float", "num_bits": 8, "strategy": "channel"}
            activations = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}
        else:
            form = "pack-quantized"
            weights |= {"type": "int", "num_bits": self.bits}
            weights |= (
                {"strategy": "group", "group_size": self.group}
                if self.kind == "int4"
                else {"strategy": "channel"}
            )
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "output_activations": None}},
            "ignore": ignored,
        }

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    def reason_against(self, shape: tuple[int, ...]) -> str | None:
        """Why a weight of this shape stays as it is; None: it can be quantised."""
        if len(shape) != 2:
            return "not a matrix of its own"
        if self.kind == "int4" and shape[1] % self.group:
            return f"{shape[1]:,} inputs are not groups of {self.group}"
        if self.kind != "fp8" and shape[1] % (32 // self.bits):
            return f"{shape[1]:,} inputs do not fill words of 32 bits"
        return None

    def parts(self, weight: Tensor) -> dict[str, Tensor]:
        """The stored tensors of a weight, (outputs, inputs), by the ends of their names."""
        values = weight.float()
        if self.kind == "fp8":
            scale = self._scale(values.unsqueeze(1), _as_fp8, weight.dtype)
            stored = _clamped(values / scale.float()[:, 0], _FP8_MAX).to(torch.float8_e4m3fn)
            return {"weight": stored, "weight_scale": scale[:, 0]}
        groups = (
            values.unflatten(1, (-1, self.group)) if self.kind == "int4" else values.unsqueeze(1)
        )
        scale = self._scale(groups, partial(_as_integers, bits=self.bits), weight.dtype)
        numbers = _as_integers(groups, scale.float(), bits=self.bits).flatten(1)
        return {
            "weight_packed": _packed(numbers.to(torch.int32) + (1 << self.bits - 1), self.bits),
            "weight_scale": scale[..., 0],
            "weight_shape": torch.tensor(weight.shape),
        }

    def _scale(
        self, groups: Tensor, rounded: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """groups: (outputs, groups, inputs) -> (outputs, groups, 1) of this dtype."""
        highest = _FP8_MAX if self.kind == "fp8" else (1 << self.bits - 1) - 0.5
        largest = groups.abs().amax(-1, keepdim=True) / highest
        largest = torch.where(largest > 0, largest, 1.0)
        best, least = largest.to(dtype), torch.full_like(largest, torch.inf)
        for factor in _SHRUNK if self.kind == "int4" else (1.0,):
            scale = (largest * factor).to(dtype)
            error = rounded(groups, scale.float()).mul_(scale.float()).sub_(groups)
            error = error.square_().sum(-1, keepdim=True)
            best = torch.where(error < least, scale, best)
            least = torch.minimum(error, least)
        return best


def _as_integers(groups: Tensor, scale: Tensor, bits: int) -> Tensor:
    half = 1 << bits - 1
    return (groups / scale).round_().clamp_(-half, half - 1)


def _as_fp8(groups: Tensor, scale: Tensor) -> Tensor:
    return _clamped(groups / scale, _FP8_MAX).to(torch.float8_e4m3fn).float()


def _clamped(values: Tensor, largest: float) -> Tensor:
    return values.clamp_(-largest, largest)


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """(rows, columns) int32, without sign -> (rows, words), the first number in the lowest bits."""
    several = numbers.unflatten(1, (-1, 32 // bits))
    packed = several[..., 0].clone()
    for place in range(1, 32 // bits):
        packed |= several[..., place] << bits * place
    return packed


@dataclass(frozen=True)
class Quantised:
    """What was done. kept: modules that stayed as they were, and why."""

    num_matrices: int
    num_bytes: int
    kept: Mapping[str, str]


def linear_weights(config: DecoderConfig, weights: StoredWeights) -> set[str]:
    """The names in the checkpoint of all matrices that the model multiplies by and that are of one
    linear layer; without the output head and routers. Raises BrokenCheckpoint or UnsupportedModel
    if the checkpoint does not fit the model."""
    model = MODELS[type(config)](
        config,
        max_model_len=1,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        products="exact",
    )
    tensors = model.checkpoint_tensors()
    shapes = {name: stored.shape for name, stored in tensors.items()}
    names = match_checkpoint(weights, shapes, model.is_redundant).names
    memories = Memories(model)
    return {
        stored
        for name, stored in names.items()
        if name in tensors
        and config.own_name(name) not in (EMBEDDINGS, HEAD)
        and all(memories.of(target) is not None for target, _ in tensors[name].parts)
    }


def quantise(
    model_dir: Path, config: DecoderConfig, scheme: Scheme, out: Path, *, show_progress: bool | None
) -> Quantised:
    """Write the model to `out`, an empty folder. show_progress: None shows a bar on a terminal.

    The weights must be floats. Raises UnsupportedModel if no matrix can be quantised.
    """
    files = SafetensorsFiles(model_dir)
    linear = linear_weights(config, files)
    kept: dict[str, str] = {}
    chosen = set()
    for name, weight in files.tensors.items():
        if not name.endswith(".weight") or len(weight.shape) != 2:
            continue
        module = name.removesuffix(".weight")
        reason = "not a linear layer" if name not in linear else scheme.reason_against(weight.shape)
        if reason is None:
            chosen.add(name)
        else:
            kept[module] = reason
    kept |= {
        name: "not a matrix of its own"
        for name in linear - chosen
        if not name.endswith(".weight") or len(files.tensors[name].shape) != 2
    }
    if not chosen:
        reasons = "; ".join(f"{module}: {why}" for module, why in list(kept.items())[:3])
        raise UnsupportedModel(
            f"{model_dir}: no matrix of the model can be quantised to {scheme.kind}: {reasons}. "
            "Use another format, or a smaller group."
        )
    _copy_others(model_dir, files, out)
    bar = tqdm(
        total=len(files.tensors),
        desc=f"Quantising {model_dir.name}",
        unit="tensor",
        disable=None if show_progress is None else not show_progress,
    )
    places: dict[str, str] = {}
    num_bytes = 0
    with bar:
        for path in dict.fromkeys(weight.path for weight in files.tensors.values()):
            made = dict(_tensors_of(path, files, chosen, scheme, bar))
            save_file(made, out / path.name, metadata={"format": "pt"})
            (out / path.name).chmod(path.stat().st_mode & 0o777)  # only the owner could read it
            places |= dict.fromkeys(made, path.name)
            num_bytes += sum(tensor.nbytes for tensor in made.values())
    if len(set(places.values())) > 1 or (model_dir / INDEX_FILE).exists():
        index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=2))
    values = json.loads((model_dir / "config.json").read_text())
    values["quantization_config"] = scheme.config(sorted({*kept, _HEAD_MODULE}))
    (out / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    return Quantised(len(chosen), num_bytes, kept)


def _copy_others(model_dir: Path, files: SafetensorsFiles, out: Path) -> None:
    weights = {weight.path.name for weight in files.tensors.values()} | {INDEX_FILE}
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and path.name not in weights and path.suffix != ".safetensors":
            shutil.copy2(path, out / path.name)


def _tensors_of(
    path: Path, files: SafetensorsFiles, chosen: set[str], scheme: Scheme, bar: Any
) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name, weight in files.tensors.items():
            if weight.path != path:
                continue
            tensor = file.get_tensor(name)
            if name in chosen:
                module = name.removesuffix("weight")
                for end, part in scheme.parts(tensor).items():
                    yield module + end, part.contiguous()
            else:
                yield name, tensor
            bar.update()
