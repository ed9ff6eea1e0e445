"""The tensor names of a checkpoint, read without importing torch.

Tools write the tensors of one model under several prefixes: with the output head or without it, and
as a part of a model that also takes images. `Layout` translates them to the names that a family has
by itself.
"""

import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final, NamedTuple

from longshore.protocol.model_files import exists, open_regular, parse_json, read_json

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
HEAD: Final = "lm_head.weight"
"""The output head, which is outside the decoder."""
EMBEDDINGS: Final = "model.embed_tokens.weight"
NORM: Final = "model.norm.weight"
CLASSIFIER: Final = "score.weight"
"""The head of a model for sequence classification."""

_MAX_HEADER_BYTES: Final = 100_000_000  # as safetensors itself
_LAYER: Final = re.compile(r"(?:^|\.)layers?\.(\d{1,9})\.")


DECODER: Final = "model."
"""How the names of a decoder begin, in most families."""

STORED_DECODERS: Final = (
    DECODER,
    "model.language_model.",  # with images, as transformers writes it since version 5
    "language_model.model.",  # with images, as it wrote it before
    "language_model.",  # with images, without the head
    "",  # without the head
)
"""How they begin in a checkpoint."""
STORED_HEADS: Final = (HEAD, "language_model.lm_head.weight", "model.lm_head.weight")
_WITH_OTHER_PARTS: Final = "language_model."
_HEADLESS: Final = ("layers.", "language_model.layers.")
_KV_SCALE: Final = re.compile(
    r"model\.(?P<layer>layers\.\d+)\.self_attn\.(?:k_proj\.(?=k)|v_proj\.(?=v))?(?P<of>[kv])_scale"
)


class Layout(NamedTuple):
    """How the tensor names of a checkpoint begin.

    own:    in the family. stored: in the checkpoint.
    head:   name of the output head in the checkpoint.
    """

    own: str
    stored: str
    head: str = HEAD

    def own_name(self, name: str) -> str | None:
        """The family's name of a stored tensor. None: it is of another part of the model, such as
        the encoder of images."""
        if name == self.head:
            return HEAD
        if name.startswith(self.stored) and name not in (HEAD, CLASSIFIER):
            return self.own + name.removeprefix(self.stored)
        if _WITH_OTHER_PARTS not in self.stored or name in (HEAD, CLASSIFIER):
            return name
        return name if name.removeprefix(DECODER).startswith(_WITH_OTHER_PARTS) else None

    def stored_name(self, name: str) -> str:
        if name == HEAD:
            return self.head
        if name == CLASSIFIER or not name.startswith(self.own):
            return name
        return self.stored + name.removeprefix(self.own)


def layout_of(found: AbstractSet[str], wanted: Iterable[str]) -> Layout:
    """The layout in which most of the `wanted` tensors of a family are `found`."""
    names = [name for name in wanted if name not in (HEAD, CLASSIFIER)]
    beginnings = {name.partition(".")[0] for name in names}
    if len(beginnings) != 1:
        return Layout("", "")
    own = f"{beginnings.pop()}."
    suffixes = [name.removeprefix(own) for name in names]
    stored = max(
        STORED_DECODERS if own == DECODER else (own, ""),
        key=lambda prefix: sum(prefix + suffix in found for suffix in suffixes),
    )
    return Layout(own, stored, next((name for name in STORED_HEADS if name in found), HEAD))


def is_bare_checkpoint(names: AbstractSet[str]) -> bool:
    """Whether the checkpoint with these tensors is a decoder without its output head, as embedding
    models are saved."""
    return names.isdisjoint(STORED_HEADS) and any(name.startswith(_HEADLESS) for name in names)


def kv_scale(name: str) -> tuple[str, str] | None:
    """The layer, such as `model.layers.0`, and `k` or `v`, if this is a scale of keys or values in
    fp8."""
    match = _KV_SCALE.fullmatch(name)
    return None if match is None else (f"model.{match['layer']}", match["of"])


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the first matching prefix; other names are unchanged."""
    for prefix, other in prefixes.items():
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name


def tensor_names(model_dir: Path) -> frozenset[str]:
    """Empty if they cannot be read; the loader reports the error later."""
    names: Any
    try:
        single = model_dir / SINGLE_FILE
        if exists(single):
            with open_regular(single) as file:
                size = int.from_bytes(file.read(8), "little")
                names = parse_json(file.read(min(size, _MAX_HEADER_BYTES)))
        else:
            index: Any = read_json(model_dir / INDEX_FILE)
            names = index["weight_map"]
        return frozenset(name for name in names if isinstance(name, str))
    except (OSError, ValueError, LookupError, TypeError):
        return frozenset()


def num_stored_layers(names: Iterable[str]) -> int:
    """The highest number of a layer in tensor names, plus 1; 0 if none has a number."""
    found = (_LAYER.search(name) for name in names)
    return max((int(match[1]) + 1 for match in found if match is not None), default=0)
