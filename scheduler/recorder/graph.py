"""Encodes an object with everything it refers to, and makes an equal one of the bytes.

A snapshot of the scheduler is such a graph. Nothing in it is listed by hand, so that it is complete
when a class gets another attribute: identity, shared arrays and views of them are preserved.

A graph may come from someone else. The decoder makes objects of a closed set of classes with
`__new__` (messages with their constructor), sets their attributes, and calls nothing else. What it
refers to by name is a class or one of a few functions: see `is_allowed`.
"""

import enum
import functools
import importlib
import logging
import struct
import time
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np

from longshore.protocol import arrays
from longshore.protocol.errors import LongshoreError

Plain: TypeAlias = bool | int | float | str | bytes | None
PLAIN_TYPES: Final = frozenset({type(None), bool, int, float, str, bytes})

PAGE_BYTES: Final = 4096
"""Of an array, pages of zeros are omitted: the column of token ids has room for the longest request
on every row, and most of it was never written."""

MAX_ARRAY_BYTES: Final = 64 << 30
"""Of all arrays of a graph. Memory is used only for pages that the graph contains."""

PACKAGES: Final = ("longshore.scheduler.", "longshore.protocol.", "longshore.connectors.base.")
_CLOSED: Final = (  # they open files and sockets, or import what a name says
    "longshore.protocol.transport.",
    "longshore.scheduler.kv_events.",
    "longshore.scheduler.process.",
    "longshore.scheduler.queue.outside_policies.",
    "longshore.scheduler.recorder.",
)
_ALSO_ALLOWED: Final = frozenset(
    {
        "longshore.scheduler.queue.queues:_position",
        "longshore.scheduler.queue.outside_policies:CheckedPolicy",
        "time:monotonic",
    }
)
_SHARED: Final = {  # compared by identity
    name: getattr(arrays, name) for name in ("EMPTY_INT32", "EMPTY_UINT8", "EMPTY_FLOAT32")
}
_NAME_OF_SHARED: Final = {id(array): name for name, array in _SHARED.items()}
_SEQUENCES: Final = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: Final = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_CONTAINERS: Final = (*_SEQUENCES.values(), *_DICTS.values(), deque)


class GraphError(LongshoreError):
    """Something cannot be encoded, or the bytes are not a graph of allowed classes."""


class Given:
    """An object that the scheduler was given, such as its connector. A graph contains only what
    says which one it is."""

    def given(self) -> tuple[str, int, dict[str, Plain]]:
        """Kind, number among its kind, and what the scheduler may read of it."""
        raise NotImplementedError


class FindGiven(Protocol):
    """Makes the object that takes the place of a `Given`."""

    def __call__(self, kind: str, number: int, values: dict[str, Any]) -> Any: ...


def is_allowed(path: str) -> bool:
    """Whether a class `module:name` may be in a graph."""
    module = path.partition(":")[0] + "."
    if path in _ALSO_ALLOWED:
        return True
    return module.startswith(PACKAGES) and not module.startswith(_CLOSED)


def encode_graph(root: Any, *, allows: Callable[[str], bool] = is_allowed) -> bytes:
    """`root` and all it refers to. Raises GraphError, with the path to it, for an object that
    cannot be encoded. allows: the classes, by path."""
    return _GraphEncoder(allows).encode(root)


def decode_graph(
    data: bytes | memoryview,
    find_given: FindGiven | None = None,
    *,
    allows: Callable[[str], bool] = is_allowed,
) -> Any:
    """Raises GraphError if the bytes are not a graph of allowed classes."""
    try:
        return _GraphDecoder(find_given, allows).decode(data)
    except GraphError:
        raise
    except (
        msgspec.MsgspecError,
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        LongshoreError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise GraphError(f"the graph is damaged: {type(error).__name__}: {error}") from error


def _path_of(named: Any) -> str:
    return f"{named.__module__}:{named.__qualname__}"


class _GraphEncoder:
    """A node per object; [n] stands for node n, and the root is node 0. An object with attributes
    is a shape (class and names of attributes), and its values."""

    def __init__(self, allows: Callable[[str], bool]) -> None:
        self._allows = allows
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []  # keeps them alive, so that no other gets the same `id`
        self._found_by: list[int] = []
        self._shapes: dict[tuple[type, tuple[str, ...]], int] = {}
        self._slots: dict[type, tuple[str, ...]] = {}
        self._current = 0

    def encode(self, root: Any) -> bytes:
        nodes: list[Any] = []
        self._number(root)
        while len(nodes) < len(self._objects):
            self._current = len(nodes)
            nodes.append(self._node(self._objects[self._current]))
        shapes = [[_path_of(cls), names] for cls, names in self._shapes]
        try:
            return msgspec.msgpack.encode([shapes, nodes])
        except (OverflowError, TypeError) as error:
            raise GraphError(f"a graph cannot be encoded: {error}") from error

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
            self._found_by.append(self._current)
        return number

    def _value(self, value: Any) -> Any:
        return value if type(value) in PLAIN_TYPES else [self._number(value)]

    def _values(self, values: Any) -> Any:
        """Without a call per value if all of them are plain, as in the columns of a large pool."""
        if PLAIN_TYPES.issuperset(map(type, values)):
            return list(values)
        number, plain = self._number, PLAIN_TYPES
        return [value if type(value) in plain else [number(value)] for value in values]

    def _node(self, value: Any) -> list[Any]:
        cls = type(value)
        if cls in PLAIN_TYPES:
            return ["plain", value]
        if cls in _SEQUENCES.values():
            return [cls.__name__, self._values(value)]
        if cls in _DICTS.values():
            return [cls.__name__, self._values(value.keys()), self._values(value.values())]
        if isinstance(value, Given):
            kind, number, values = value.given()
            return ["given", kind, number, self._value(values)]
        if isinstance(value, enum.Enum):
            return ["enum", self._path(cls), value.name]
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, msgspec.Struct):
            return self._message(value, cls)
        if isinstance(value, type) or id(value) in _BY_ID:
            return ["name", self._path(value)]
        return self._special(value, cls) or self._object(value, cls)

    def _message(self, value: msgspec.Struct, cls: type[msgspec.Struct]) -> list[Any]:
        """Fields that hold the very object of their default are omitted, because the encoding and
        the digest of a plan omit them, too."""
        defaults = cls.__struct_defaults__
        missing = object()
        padded = (missing,) * (len(cls.__struct_fields__) - len(defaults)) + defaults
        fields = {
            name: field
            for name, default in zip(cls.__struct_fields__, padded, strict=True)
            if (field := getattr(value, name)) is not default
        }
        return ["message", self._shape(cls, tuple(fields)), self._values(fields.values())]

    def _special(self, value: Any, cls: type) -> list[Any] | None:
        """Objects of the standard library and of numpy."""
        match value:
            case bytearray():
                return ["bytearray", bytes(value)]
            case memoryview():
                return self._memoryview(value)
            case np.generic():
                return ["scalar", value.dtype.str, value.tobytes()]
            case deque():
                return ["deque", self._values(value), value.maxlen]
            case defaultdict():
                factory = self._value(value.default_factory)
                keys, values = self._values(value.keys()), self._values(value.values())
                return ["defaultdict", factory, keys, values]
            case tuple():
                return ["named", self._path(cls), self._values(value)]
            case struct.Struct():
                return ["struct", value.format]
            case functools.partial():
                return [
                    "partial",
                    self._value(value.func),
                    self._value(value.args),
                    self._value(value.keywords),
                ]
            case logging.Logger():
                return ["logger", value.name]
            case types.MethodType() | types.BuiltinMethodType() if value.__self__ is not None:
                return ["method", self._value(value.__self__), value.__name__]
            case types.MappingProxyType():
                return ["proxy", self._value(dict(value))]
            case range() | slice():
                return [cls.__name__, [value.start, value.stop, value.step]]
            case types.FunctionType() | types.BuiltinFunctionType():
                return ["name", self._path(value)]
        return None

    def _object(self, value: Any, cls: type) -> list[Any]:
        if cls.__module__ == "builtins" or isinstance(value, types.ModuleType):
            raise self._unknown(value)
        names = self._slots.get(cls)
        if names is None:
            slots = (vars(base).get("__slots__", ()) for base in cls.__mro__)
            flat = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
            names = self._slots[cls] = tuple(name for name in flat if not name.startswith("__"))
        names = tuple(name for name in names if hasattr(value, name))
        own = getattr(value, "__dict__", {})
        values = [*(getattr(value, name) for name in names), *own.values()]
        names += tuple(own)
        return ["object", self._shape(cls, names), self._values(values)]

    def _array(self, value: np.ndarray) -> list[Any]:
        name = _NAME_OF_SHARED.get(id(value))
        if name is not None:
            return ["shared", name]
        if value.dtype.hasobject:
            raise self._unknown(value)
        owner: Any = value
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        while isinstance(owner, memoryview):
            owner = owner.obj
        is_own = owner is value or not isinstance(owner, np.ndarray | bytearray)
        if is_own:
            if owner is not value and value.flags.writeable:
                raise self._unknown(owner)
            if not value.flags.c_contiguous:
                if owner is value:
                    raise self._unknown(value)
                value = np.ascontiguousarray(value)
            flags = bool(value.flags.writeable)
            return ["array", value.dtype.str, list(value.shape), flags, _pages(value)]
        start = _address(np.frombuffer(owner, np.uint8) if type(owner) is bytearray else owner)
        return [
            "view",
            self._value(owner),
            value.dtype.str,
            list(value.shape),
            list(value.strides),
            _address(value) - start,
            bool(value.flags.writeable),
        ]

    def _memoryview(self, value: memoryview) -> list[Any]:
        whole = memoryview(value.obj)
        if whole.nbytes != value.nbytes or whole.format != value.format:
            raise self._unknown(value)
        return ["memoryview", self._value(value.obj)]

    def _shape(self, cls: type, names: tuple[str, ...]) -> int:
        number = self._shapes.get((cls, names))
        if number is None:
            self._path(cls)
            number = self._shapes[cls, names] = len(self._shapes)
        return number

    def _path(self, named: Any) -> str:
        path = _BY_ID.get(id(named)) or _path_of(named)
        if not self._allows(path) and path not in _BUILTIN_NAMES:
            raise self._unknown(named)
        return path

    def _unknown(self, value: Any) -> GraphError:
        owners: list[str] = []
        number = self._current
        while number and len(owners) < 8:
            owners.append(type(self._objects[number]).__name__)
            number = self._found_by[number]
        chain = " of ".join(owners) or "the root"
        return GraphError(
            f"a graph cannot contain {value!r:.100} ({type(value)}), found in {chain}"
        )


_BUILTIN_NAMES: Final = {f"builtins:{each.__name__}": each for each in _CONTAINERS[:4]} | {
    "builtins:dict": dict,
    "builtins:int": int,
    "collections:deque": deque,
    "collections:Counter": Counter,
    "collections:OrderedDict": OrderedDict,
}


_OUTSIDE: Final[dict[str, Any]] = {"time:monotonic": time.monotonic}
_BY_ID: Final = {id(function): path for path, function in _OUTSIDE.items()}


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _pages(array: np.ndarray) -> list[Any]:
    """[offset, bytes, offset, bytes, ...] of the parts that are not zero; small arrays are one."""
    flat = array.reshape(-1).view(np.uint8)
    if flat.nbytes <= 4 * PAGE_BYTES:
        return [0, flat.tobytes()]
    num_whole = flat.nbytes // PAGE_BYTES
    words = flat[: num_whole * PAGE_BYTES].view(np.int64).reshape(num_whole, -1)
    used = words.any(axis=1)
    edges = np.flatnonzero(np.diff(used, prepend=False, append=False)).tolist()
    pages: list[Any] = []
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        start = first * PAGE_BYTES
        pages += [start, flat[start : last * PAGE_BYTES].tobytes()]
    tail = num_whole * PAGE_BYTES
    if tail < flat.nbytes:
        pages += [tail, flat[tail:].tobytes()]
    return pages


class _GraphDecoder:
    """Makes all objects first, and fills them when all exist: attributes and sequences, then dicts
    and sets, whose keys must be complete to be hashed."""

    def __init__(self, find_given: FindGiven | None, allows: Callable[[str], bool]) -> None:
        self._find_given = find_given
        self._allows = allows
        self._made: dict[int, Any] = {}
        self._fills: list[Callable[[], None]] = []
        self._keyed_fills: list[Callable[[], None]] = []
        self._num_array_bytes = 0
        self._shapes: list[tuple[type, tuple[str, ...]]] = []
        self._nodes: list[Any] = []

    def decode(self, data: bytes | memoryview) -> Any:
        shapes, self._nodes = msgspec.msgpack.decode(data, type=tuple[list[Any], list[Any]])
        for path, names in shapes:
            if any(type(name) is not str or name.startswith("__") for name in names):
                raise GraphError(f"{path!r} cannot have the attributes {names!r}")
            self._shapes.append((self._class(path), tuple(names)))
        root = self._make(0)
        for number in range(len(self._nodes)):
            self._make(number)
        for fill in (*self._fills, *self._keyed_fills):
            fill()
        return root

    def _value(self, value: Any) -> Any:
        if type(value) is list:
            (number,) = value
            return self._made[number] if number in self._made else self._make(number)
        return value

    def _values(self, values: list[Any]) -> list[Any]:
        return [self._value(value) if type(value) is list else value for value in values]

    def _make(self, number: int) -> Any:
        if number in self._made:
            return self._made[number]
        kind, *parts = self._nodes[number]
        made = self._made[number] = self._make_node(kind, parts)
        return made

    def _make_node(self, kind: str, parts: list[Any]) -> Any:
        match kind, parts:
            case "plain", [value]:
                return value
            case "tuple" | "frozenset", [items]:
                return _SEQUENCES[kind](self._values(items))
            case "list", [items]:
                if list not in map(type, items):
                    return items
                made: list[Any] = []
                self._fills.append(lambda: made.extend(self._values(items)))
                return made
            case "set", [items]:
                made_set: set[Any] = set()
                self._keyed_fills.append(lambda: made_set.update(self._values(items)))
                return made_set
            case "deque", [items, maxlen]:
                queue: deque[Any] = deque(maxlen=maxlen)
                self._fills.append(lambda: queue.extend(self._values(items)))
                return queue
            case "dict" | "OrderedDict" | "Counter", [keys, values]:
                return self._dict(_DICTS[kind](), keys, values)
            case "defaultdict", [factory, keys, values]:
                return self._dict(defaultdict(self._value(factory)), keys, values)
            case "object", [shape, values]:
                return self._object(shape, values)
            case "message", [shape, values]:
                cls, names = self._shapes[shape]
                if not issubclass(cls, msgspec.Struct):
                    raise GraphError(f"{cls} is not a message")
                return cls(**dict(zip(names, self._values(values), strict=True)))
            case "enum", [path, name]:
                return self._class(path, enum.Enum)[name]
            case "named", [path, items]:
                return tuple.__new__(self._class(path, tuple), self._values(items))
            case "given", [given, number, values]:
                if self._find_given is None:
                    raise GraphError(f"unexpected object {given!r}")
                return self._find_given(given, number, self._whole_dict(values))
            case "name", [path]:
                return self._named(path)
            case "method", [owner, name]:
                return self._method(self._value(owner), name)
            case "partial", [function, arguments, named]:
                bound = self._value(arguments)
                return functools.partial(
                    self._function(function), *bound, **self._whole_dict(named)
                )
            case "logger", [str(name)] if name.startswith("longshore."):
                return logging.getLogger(name)
        return self._make_array(kind, parts)

    def _make_array(self, kind: str, parts: list[Any]) -> Any:
        match kind, parts:
            case "array", [dtype, shape, is_writeable, pages]:
                self._num_array_bytes += _num_bytes(dtype, shape)
                if self._num_array_bytes > MAX_ARRAY_BYTES:
                    raise GraphError(f"the arrays have more than {MAX_ARRAY_BYTES} bytes")
                array = np.zeros(tuple(shape), _dtype(dtype))
                flat = array.reshape(-1).view(np.uint8)
                for start, data in zip(pages[::2], pages[1::2], strict=True):
                    if start < 0:
                        raise GraphError("a page begins before its array")
                    flat[start : start + len(data)] = np.frombuffer(data, np.uint8)
                array.setflags(write=is_writeable)
                return array
            case "view", [owner, dtype, shape, strides, offset, is_writeable]:
                memory = self._value(owner)
                if not isinstance(memory, np.ndarray | bytearray):
                    raise GraphError("a view of something that is not an array")
                view: Any = np.ndarray(
                    tuple(shape), _dtype(dtype), memory, offset=offset, strides=tuple(strides)
                )
                view.setflags(write=is_writeable)
                return view
            case "memoryview", [owner]:
                return memoryview(self._value(owner))
            case "bytearray", [bytes(data)]:
                return bytearray(data)
            case "scalar", [dtype, data]:
                return np.frombuffer(data, _dtype(dtype))[0]
            case "shared", [name]:
                return _SHARED[name]
            case "struct", [text]:
                return struct.Struct(text)
            case "proxy", [values]:
                return types.MappingProxyType(self._value(values))
            case "range", [limits]:
                return range(*limits)
            case "slice", [limits]:
                return slice(*limits)
        raise GraphError(f"unknown node {kind!r:.50}")

    def _dict(self, made: dict[Any, Any], keys: list[Any], values: list[Any]) -> dict[Any, Any]:
        def fill() -> None:
            for key, value in zip(self._values(keys), self._values(values), strict=True):
                made[key] = value

        self._keyed_fills.append(fill)
        return made

    def _whole_dict(self, reference: Any) -> dict[str, Any]:
        """The content of a dict that is needed before dicts are filled."""
        if type(reference) is not list or self._nodes[reference[0]][0] != "dict":
            raise GraphError("not a dict")
        _, keys, values = self._nodes[reference[0]]
        return dict(zip(keys, self._values(values), strict=True))

    def _object(self, shape: int, values: list[Any]) -> Any:
        cls, names = self._shapes[shape]
        if issubclass(cls, msgspec.Struct | enum.Enum | type):
            raise GraphError(f"{cls} is not a class of objects")
        made = object.__new__(cls)

        def fill() -> None:
            for name, value in zip(names, values, strict=True):
                object.__setattr__(made, name, self._value(value))

        self._fills.append(fill)
        return made

    def _class(self, path: Any, parent: type = object) -> Any:
        cls = self._named(path)
        if not isinstance(cls, type) or not issubclass(cls, parent):
            raise GraphError(f"{path!r} is not the expected class")
        return cls

    def _named(self, path: Any) -> Any:
        if type(path) is not str:
            raise GraphError(f"{path!r} is not a name")
        if path in _BUILTIN_NAMES:
            return _BUILTIN_NAMES[path]
        if path in _OUTSIDE:
            return _OUTSIDE[path]
        if not self._allows(path):
            raise GraphError(f"{path!r:.100} is not allowed in a record")
        module, _, name = path.partition(":")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = vars(found)[part]
        if not isinstance(found, type) and path not in _ALSO_ALLOWED:
            raise GraphError(f"{path!r:.100} is not a class")
        return found

    def _function(self, reference: Any) -> Any:
        function = self._value(reference)
        if not isinstance(function, types.MethodType | types.FunctionType):
            raise GraphError(f"{function!r:.100} is not a function")
        return function

    def _method(self, owner: Any, name: Any) -> Any:
        if type(name) is not str or name.startswith("__"):
            raise GraphError(f"{name!r:.50} is not a method")
        method = getattr(type(owner), name)
        if not isinstance(method, types.FunctionType | types.MethodDescriptorType):
            raise GraphError(f"{name!r:.50} is not a method")
        return method.__get__(owner)


def _dtype(text: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(text)
    if type(text) is not str or dtype.hasobject:
        raise GraphError(f"{text!r:.50} is not an element type of arrays")
    return dtype


def _num_bytes(dtype: Any, shape: list[int]) -> int:
    count = _dtype(dtype).itemsize
    for length in shape:
        if type(length) is not int or length < 0:
            raise GraphError(f"{shape!r:.50} is not the shape of an array")
        count *= length
    return count
