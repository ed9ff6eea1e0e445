"""The tensors of safetensors files that are quantised, as `quantization_config` says. Each is read
as floats: only the part that is asked for is dequantised."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from longshore.protocol.errors import shortened
from longshore.worker.errors import BrokenCheckpoint
from longshore.worker.loading.module_names import MAX_NAME
from longshore.worker.loading.quantisation_method import Module, Quantisation
from longshore.worker.loading.quantised_tensor import QuantisedTensor
from longshore.worker.loading.safetensors_files import SafetensorsFiles
from longshore.worker.loading.stored_weights import (
    QuantisedForm,
    ReadTensor,
    StoredWeight,
    StoredWeights,
    WeightReader,
)

if TYPE_CHECKING:
    from torch import Tensor

    from longshore.worker.kernels.packing import QuantisedRows


class QuantisedWeights(StoredWeights):
    """The parts of a quantised tensor are replaced with one tensor, such as `up_proj.weight`. Other
    tensors, such as those of layers that are not quantised, are those of the files."""

    def __init__(self, files: SafetensorsFiles, quantisation: Quantisation) -> None:
        """Raises BrokenCheckpoint if a part is missing, or does not fit quantization_config."""
        self.model_dir = files.model_dir
        self.method = quantisation.method
        self.dtypes = (*files.dtypes, quantisation.method)
        self._files = files
        self.quantised: dict[str, QuantisedTensor] = {}
        tensors: dict[str, StoredWeight] = {}
        hidden: set[str] = set()
        with files.integers() as integers:
            for module in _modules(files.tensors, quantisation):
                end = _quantised_end(module, quantisation)
                if end is None:
                    continue
                tensor = quantisation.tensor(module, end, integers)
                self.quantised[module.name + quantisation.ends[end]] = tensor
                bits = tensor.bits_in_memory(files.tensors[tensor.numbers.name].dtype)
                weight = StoredWeight(tensor.path, tensor.shape, quantisation.method, bits)
                tensors[module.name + end] = weight
                hidden |= {module.name + part for part in module.parts}
        renamed = {tensor.numbers.name: name for name, tensor in self.quantised.items()}
        self.tensors = {
            renamed.get(name, name): tensors.get(name, weight)
            for name, weight in files.tensors.items()
            if name in renamed or name not in hidden
        }

    @contextmanager
    def reader(self) -> Iterator[WeightReader]:
        with self._files.reader() as read_stored:
            yield _QuantisedReader(self.quantised, self._files, read_stored)


class _QuantisedReader(WeightReader):
    def __init__(
        self,
        quantised: Mapping[str, QuantisedTensor],
        files: SafetensorsFiles,
        read_stored: ReadTensor,
    ) -> None:
        super().__init__(read_stored)
        self._quantised, self._files = quantised, files
        self._forms: dict[str, QuantisedForm | None] = {}

    def __call__(self, name: str, index: tuple[slice, ...]) -> "Tensor":
        from longshore.worker.loading.dequantise import dequantise

        quantised = self._quantised.get(name)
        if quantised is None:
            return self._read(name, index)
        return dequantise(quantised, index, self._read)

    def form(self, name: str) -> QuantisedForm | None:
        from longshore.worker.loading.kept_quantised import form_of

        if name not in self._forms:
            quantised, form = self._quantised.get(name), None
            if quantised is not None:
                dtype = self._files.tensors[quantised.numbers.name].dtype
                form = form_of(quantised, dtype, self._read)
            self._forms[name] = form
        return self._forms[name]

    def rows(self, name: str, rows: "Tensor", columns: slice) -> "QuantisedRows":
        from longshore.worker.loading.kept_quantised import quantised_rows

        form = self.form(name)
        assert form is not None
        return quantised_rows(self._quantised[name], form, rows, columns, self._read)


def _modules(tensors: Mapping[str, StoredWeight], quantisation: Quantisation) -> Iterator[Module]:
    """The modules that have a tensor with one of the method's ends."""
    ends = sorted(
        (*quantisation.ends, *quantisation.parts, *quantisation.unused), key=len, reverse=True
    )
    found: dict[str, dict[str, StoredWeight]] = {}
    for name, weight in tensors.items():
        end = next((end for end in ends if name.endswith(end)), None)
        if end is not None:
            module = name.removesuffix(end)
            if len(module) > MAX_NAME:
                raise BrokenCheckpoint(
                    f"{weight.path}: {shortened(module)} has {len(module):,} characters; names of "
                    f"quantised modules may have {MAX_NAME}. Fetch the file again."
                )
            found.setdefault(module, {})[end] = weight
    return (Module(name, parts) for name, parts in found.items())


def _quantised_end(module: Module, quantisation: Quantisation) -> str | None:
    """The end of the tensor with the numbers; None: the module is not quantised."""
    for end, replaced in quantisation.ends.items():
        weight = module.parts.get(end)
        # Where numbers have the name of a tensor that is not quantised, their dtype differs.
        if weight is not None and (end != replaced or weight.dtype not in StoredWeights.dtypes):
            return end
    return None
