"""The tensors of safetensors files: one file, or shards listed by an index."""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from longshore.protocol.model_files import exists, open_regular
from longshore.worker.errors import BrokenCheckpoint, some_of
from longshore.worker.loading.stored_weights import StoredWeight, StoredWeights, WeightReader
from longshore.worker.loading.tensor_names import INDEX_FILE, SINGLE_FILE
from longshore.worker.models.json_fields import read_json_object


class SafetensorsFiles(StoredWeights):
    """Files are memory-mapped, so that a part of a tensor is read once."""

    def __init__(self, model_dir: Path) -> None:
        """Raises BrokenCheckpoint if a file is missing, truncated, or lacks a tensor listed in the
        index."""
        self.model_dir = model_dir
        self.tensors = {
            name: weight
            for path, names in _find_tensors(model_dir).items()
            for name, weight in _weights_of(path, names)
        }

    @contextmanager
    def reader(self) -> Iterator[WeightReader]:
        with self._reading("pt") as read:
            yield WeightReader(read)

    @contextmanager
    def integers(self) -> Iterator[Callable[[str], list[int]]]:
        """Reads small tensors of integers, by name, without torch."""
        with self._reading("np") as read:
            yield lambda name: [int(value) for value in read(name, (slice(None),))]

    @contextmanager
    def _reading(self, framework: Literal["np", "pt"]) -> Iterator[Callable[..., Any]]:
        with ExitStack() as opened:
            files: dict[Path, safe_open] = {}

            def read(name: str, index: tuple[slice, ...]) -> Any:
                path = self.tensors[name].path
                if path not in files:
                    files[path] = opened.enter_context(_open(path, framework))
                with _naming(path):
                    return files[path].get_slice(name)[index]

            yield read


def has_safetensors(model_dir: Path) -> bool:
    return exists(model_dir / SINGLE_FILE) or exists(model_dir / INDEX_FILE)


def _find_tensors(model_dir: Path) -> dict[Path, set[str]]:
    """The checkpoint's files and the tensors to read from each.

    Raises BrokenCheckpoint if a file is missing, truncated, or lacks a tensor listed in the index.
    """
    single = model_dir / SINGLE_FILE
    if exists(single):
        return {single: _names_of(single)}
    index = model_dir / INDEX_FILE
    if not exists(index):
        raise BrokenCheckpoint(
            f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE} nor a GGUF file. Convert "
            "other formats to one of the two first."
        )
    weight_map = read_json_object(index).table("weight_map")
    if weight_map is None or not weight_map.values:
        raise BrokenCheckpoint(
            f"{index} has no weight_map, so no tensor can be found. Fetch the file again."
        )
    listed: dict[Path, set[str]] = {}
    for name, file_name in weight_map.values.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise weight_map.wrong(name, "the name of a file in the same folder")
        listed.setdefault(model_dir / file_name, set()).add(name)
    absent = sorted(path.name for path in listed if not path.exists())
    if absent:
        raise BrokenCheckpoint(
            f"{index} lists {some_of(absent)}, not in the folder. Fetch the missing shards."
        )
    for path, names in listed.items():
        lacking = sorted(names - _names_of(path))
        if lacking:
            raise BrokenCheckpoint(
                f"{path} lacks {some_of(lacking)}, listed in {INDEX_FILE}. "
                "Index and shards are of different checkpoints; fetch both again."
            )
    return listed


def _open(path: Path, framework: Literal["np", "pt"]) -> safe_open:
    """pt: imports torch."""
    with _naming(path):
        open_regular(path).close()
        return safe_open(path, framework=framework, device="cpu")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise BrokenCheckpoint(
            f"{path} is not a complete safetensors file: {error}. Fetch it again."
        ) from error


def _names_of(path: Path) -> set[str]:
    with _open(path, "np") as file:
        return set(file.keys())


def _weights_of(path: Path, names: AbstractSet[str]) -> Iterator[tuple[str, StoredWeight]]:
    with _open(path, "np") as file:
        for name in file.offset_keys():
            if name in names:
                view = file.get_slice(name)
                yield name, StoredWeight(path, tuple(view.get_shape()), view.get_dtype())
