"""Checks that a checkpoint fits a model, by the headers of its files, without torch.

Every tensor of the model must be there with the expected shape, and every tensor that is there must
be used. The supervisor checks it before it starts a process (`check_checkpoint`), and the loader
for what a rank loads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from longshore.protocol.errors import shortened
from longshore.protocol.model_files import exists
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel, some_of
from longshore.worker.loading.gguf_files import GgufFiles, has_gguf
from longshore.worker.loading.quantised_weights import QuantisedWeights
from longshore.worker.loading.quantization_config import read_quantisation
from longshore.worker.loading.safetensors_files import SafetensorsFiles
from longshore.worker.loading.stored_weights import StoredWeights
from longshore.worker.loading.tensor_names import Layout, layout_of
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.json_fields import read_json_object


@dataclass(frozen=True)
class Checkpoint:
    """names: of the tensors in the checkpoint, by the names that the family has for them."""

    layout: Layout
    weights: StoredWeights
    names: Mapping[str, str]


def find_weights(model_dir: Path) -> StoredWeights:
    """The weights of a model folder. Raises BrokenCheckpoint if a file is missing or damaged, and
    UnsupportedModel if they are quantised in a way that is not supported."""
    if has_gguf(model_dir):
        return GgufFiles(model_dir)
    files = SafetensorsFiles(model_dir)
    path = model_dir / "config.json"
    quantisation = read_quantisation(read_json_object(path)) if exists(path) else None
    return files if quantisation is None else QuantisedWeights(files, quantisation)


def check_checkpoint(config: DecoderConfig, weights: StoredWeights) -> None:
    """Check the whole model of `config`, a family of this package. Raises as `match_checkpoint`."""

    def is_redundant(name: str) -> bool:
        return config.is_redundant(config.own_name(name))

    match_checkpoint(weights, config.tensor_shapes(), is_redundant)


def match_checkpoint(
    weights: StoredWeights,
    wanted: Mapping[str, tuple[int, ...]],
    is_redundant: Callable[[str], bool],
) -> Checkpoint:
    """Find the tensors of a model.

    wanted: the shapes of the tensors that it needs. is_redundant: whether the checkpoint may have
    others. Raises BrokenCheckpoint naming files and tensors that are missing, truncated or have the
    wrong shape, and UnsupportedModel for tensors that the model does not use.
    """
    layout = layout_of(weights.tensors.keys(), wanted)
    own_names = {stored: layout.own_name(stored) for stored in weights.tensors}
    names = {own: stored for stored, own in own_names.items() if own is not None}
    _check_names(weights.model_dir, layout, names, wanted, is_redundant)
    for own in sorted(wanted):
        _check_tensor(names[own], weights, wanted[own])
    return Checkpoint(layout, weights, names)


def _check_names(
    model_dir: Path,
    layout: Layout,
    names: Mapping[str, str],
    wanted: Mapping[str, tuple[int, ...]],
    is_redundant: Callable[[str], bool],
) -> None:
    missing = sorted(map(layout.stored_name, wanted.keys() - names.keys()))
    if missing:
        raise BrokenCheckpoint(
            f"{model_dir} lacks {some_of(missing)}, which config.json requires. "
            "The weights are incomplete, or config.json belongs to another model."
        )
    extra = sorted(
        stored for name, stored in names.items() if name not in wanted and not is_redundant(name)
    )
    if extra:
        raise UnsupportedModel(
            f"{model_dir} has {some_of(extra)}, which this model does not use; its output would be "
            "wrong. Check that config.json belongs to these weights."
        )


def _check_tensor(name: str, weights: StoredWeights, shape: tuple[int, ...]) -> None:
    weight = weights.tensors[name]
    if weight.shape != shape:
        raise BrokenCheckpoint(
            f"{weight.path}: {shortened(name)} has shape {weight.shape}, but config.json implies "
            f"{shape}. Config and weights belong to different models."
        )
    if weight.dtype not in weights.dtypes:
        raise UnsupportedModel(
            f"{weight.path}: {shortened(name)} is stored as {weight.dtype}; only "
            f"{', '.join(weights.dtypes)} are supported. Use a checkpoint that is not quantised."
        )
