"""Random JSON schemas: every keyword that restricts values is among them, nested at most twice."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from hypothesis import strategies as st

Schemas: TypeAlias = st.SearchStrategy[Mapping[str, Any] | bool]

VALUES = st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4)
NAMES = st.sampled_from(["name", "size", "a b", 'quote"', "é", ""])
PATTERNS = st.sampled_from(["^[a-z]+$", "[0-9]{2,4}", "^(yes|no)", "\\d$", "^\\S+@\\S+$", "x*"])
FORMATS = st.sampled_from(
    ["date", "date-time", "time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "regex"]
)


def optional(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def ordered(
    low: str, high: str, numbers: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    """Neither, one or both of two limits."""
    both = st.tuples(numbers, numbers).map(sorted).map(lambda pair: {low: pair[0], high: pair[1]})
    return st.just({}) | numbers.map(lambda value: {low: value}) | both


def merged(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda given: {k: v for part in given for k, v in part.items()})


def of_type(name: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.just({"type": name})


def numbers(kind: str) -> Schemas:
    limits = st.integers(-1000, 1000)
    steps = st.sampled_from([{}, {}, {}, {"multipleOf": 5}])
    ranges = ordered("minimum", "maximum", limits) | limits.map(
        lambda low: {"exclusiveMinimum": low, "exclusiveMaximum": low + 50}
    )
    return merged(of_type(kind), ranges, steps)


def strings() -> Schemas:
    sizes = ordered("minLength", "maxLength", st.integers(0, 30))
    texts = optional(pattern=PATTERNS) | optional(format=FORMATS)
    return merged(of_type("string"), sizes) | merged(of_type("string"), texts)


def leaves() -> Schemas:
    return st.one_of(
        st.sampled_from([{}, True, {"type": "null"}, {"type": "boolean"}]),
        st.lists(st.sampled_from(["null", "integer", "string"]), min_size=1, unique=True).map(
            lambda names: {"type": names}
        ),
        numbers("integer"),
        numbers("number"),
        strings(),
        VALUES.map(lambda value: {"const": value}),
        st.lists(VALUES, min_size=1, max_size=5).map(lambda values: {"enum": values}),
    )


def arrays(inner: Schemas) -> Schemas:
    return merged(
        of_type("array"),
        ordered("minItems", "maxItems", st.integers(0, 5)),
        st.just({}) | optional(items=inner, prefixItems=st.lists(inner, min_size=1, max_size=3)),
        st.sampled_from([{}] * 7 + [{"uniqueItems": True}]),
    )


def objects(inner: Schemas) -> Schemas:
    return merged(
        of_type("object"),
        optional(
            properties=st.dictionaries(NAMES, inner, max_size=4),
            required=st.lists(NAMES, max_size=3, unique=True),
            additionalProperties=inner | st.booleans(),
        ),
        st.sampled_from([{}] * 7 + [{"maxProperties": 3}, {"minProperties": 1}]),
        st.just({})
        | st.just({})
        | optional(patternProperties=st.dictionaries(PATTERNS, inner, max_size=1)),
    )


def json_schemas() -> Schemas:
    once = leaves() | arrays(leaves()) | objects(leaves())
    several = st.lists(once, min_size=1, max_size=3)
    kinds: list[Schemas] = [
        *([leaves()] * 3),
        *([arrays(once)] * 4),
        *([objects(once)] * 6),
        *([several.map(lambda given: {"anyOf": given})] * 2),
        several.map(lambda given: {"oneOf": given}),
        several.map(lambda given: {"allOf": given}),
        once.map(lambda given: {"$defs": {"one": given}, "$ref": "#/$defs/one"}),
        once.map(lambda given: {"not": given}),
        once.map(lambda given: {"if": given, "then": {}, "else": given}),
    ]
    return st.integers(0, len(kinds) - 1).flatmap(kinds.__getitem__)
