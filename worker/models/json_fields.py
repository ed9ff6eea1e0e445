"""Typed access to a checkpoint's config.json; errors name the file, the key and the value."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, TypeVar

from longshore.protocol.errors import MAX_ECHOED_CHARACTERS, shortened
from longshore.protocol.model_files import exists, read_json
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel

Number = TypeVar("Number", int, float)

MAX_NUMBER: Final = 1e15
"""More than any number of a model; products of two are still finite."""

MAX_COUNT: Final = 16_384
"""More layers, or experts of a layer, than any model has."""


class JsonFields:
    """One JSON object of a checkpoint, and its source.

    An absent key and null mean the same, because writers use either.
    """

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self.values = values
        self.source = source

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An int of at least `minimum`; raises BrokenCheckpoint if missing without a default."""
        return self._number(int, key, default, minimum)

    def count(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A number of things that are enumerated, such as layers: an int of at least `minimum`, and
        at most MAX_COUNT."""
        number = self.integer(key, default, minimum=minimum)
        if number > MAX_COUNT:
            raise self.wrong(key, f"a number of at most {MAX_COUNT:,}")
        return number

    def real(self, key: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        """A float (or an int, converted) from `minimum` to MAX_NUMBER."""
        return float(self._number(float, key, default, minimum))

    def reals(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` floats above 0; raises BrokenCheckpoint if missing."""
        values = self.values.get(key)
        if (
            not isinstance(values, list)
            or len(values) != count
            or not all(type(value) in (int, float) and value > 0 for value in values)
        ):
            raise self.wrong(key, f"a list of {count} numbers above 0")
        return tuple(map(float, values))

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string of at most MAX_ECHOED_CHARACTERS, so that messages may repeat it."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > MAX_ECHOED_CHARACTERS:
            raise self.wrong(key, f"a string of at most {MAX_ECHOED_CHARACTERS} characters")
        return value

    def table(self, key: str) -> "JsonFields | None":
        """The object under `key`, or None if it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return JsonFields(value, f"{self.source}, {key}")

    def sibling_file(self, file_name: str) -> "JsonFields | None":
        """The object in another file of the same folder, or None if there is no such file. Only for
        the top-level object of a file. Raises BrokenCheckpoint."""
        path = Path(self.source).with_name(file_name)
        return read_json_object(path) if exists(path) else None

    def with_defaults(
        self, defaults: Mapping[str, object], *, nullable: Collection[str] = ()
    ) -> "JsonFields":
        """The same fields with a family's defaults for absent and null keys.

        nullable: keys for which null differs from absence.
        """
        given = {k: v for k, v in self.values.items() if v is not None or k in nullable}
        return JsonFields({**defaults, **given}, self.source)

    def reject_unless_neutral(self, key: str, neutral: object, why: str) -> None:
        """Raise UnsupportedModel if `key` is set to anything but `neutral`."""
        value = self.values.get(key)
        if value is not None and value != neutral:
            raise UnsupportedModel(
                f"{self.source}: {key}={shortened(repr(value))}: {why}. "
                "Use a checkpoint without it."
            )

    def wrong(self, key: str, expected: str) -> BrokenCheckpoint:
        value = shortened(repr(self.values.get(key)))
        return BrokenCheckpoint(
            f"{self.source}: {shortened(key)}={value} must be {expected}. "
            "Repair the file or fetch it again."
        )

    def _number(
        self, kind: type[Number], key: str, default: Number | None, minimum: Number
    ) -> Number:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise BrokenCheckpoint(
                    f"{self.source}: {key} is missing, and the model cannot be built without it."
                )
            return default
        accepted = (int,) if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise self.wrong(key, f"a number of at least {minimum}")
        if not minimum <= value <= MAX_NUMBER:
            raise self.wrong(key, f"a number from {minimum} to {MAX_NUMBER:.0e}")
        return kind(value)


def read_json_object(path: Path) -> JsonFields:
    """The JSON object in `path`. Raises BrokenCheckpoint if there is none."""
    try:
        values = read_json(path)
    except FileNotFoundError:
        raise BrokenCheckpoint(
            f"{path} does not exist. A model is a folder in Hugging Face format."
        ) from None
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{path} is not readable JSON: {error}") from error
    if not isinstance(values, dict):
        raise BrokenCheckpoint(f"{path} does not hold a JSON object. Fetch it again.")
    return JsonFields(values, str(path))
