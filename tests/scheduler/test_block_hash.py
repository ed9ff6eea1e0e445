"""Block names: recomputed here with hashlib from the documented layout."""

import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.errors import ConfigError
from longshore.scheduler.block_hash import BlockHasher, block_key, split_block_key

SEED = b"a deployment's seed"
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def names_of(tokens: list[int], *, block_size: int = 4, seed: bytes = SEED, **keys: str) -> list:
    names: list[bytes] = []
    BlockHasher(block_size, seed).extend(names, np.array(tokens, np.int32), **keys)
    return names


def names_by_hand(tokens: list[int], block_size: int, salt: str | None, seed: bytes) -> list[bytes]:
    """H(parent ‖ little-endian int32 tokens ‖ framed salt on the first block)."""
    parent = hashlib.sha256(b"longshore block names\0" + seed).digest()
    names = []
    for index in range(len(tokens) // block_size):
        block = tokens[index * block_size : (index + 1) * block_size]
        data = parent + struct.pack(f"<{block_size}i", *block)
        if index == 0 and salt is not None:
            for part in (b"salt", salt.encode()):
                data += struct.pack(">I", len(part)) + part
        parent = hashlib.sha256(data).digest()
        names.append(parent)
    return names


@pytest.mark.req("HSH-04", "HSH-05")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(token_ids, st.sampled_from([1, 2, 4, 16]), st.none() | st.text(max_size=5))
def test_names_are_the_documented_chain(
    tokens: list[int], block_size: int, salt: str | None
) -> None:
    names = names_of(tokens, block_size=block_size, cache_salt=salt)
    assert names == names_by_hand(tokens, block_size, salt, SEED)


@pytest.mark.req("HSH-05")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(token_ids, st.lists(st.integers(0, 40), max_size=5), st.none() | st.just("salt"))
def test_hashing_in_pieces_gives_the_names_of_hashing_at_once(
    tokens: list[int], pieces: list[int], salt: str | None
) -> None:
    hasher = BlockHasher(4, SEED)
    names: list[bytes] = []
    for end in sorted(min(piece, len(tokens)) for piece in pieces):
        before = list(names)
        hasher.extend(names, np.array(tokens[:end], np.int32), cache_salt=salt)
        assert names[: len(before)] == before
        assert len(names) == end // 4
    hasher.extend(names, np.array(tokens, np.int32), cache_salt=salt)
    assert names == names_of(tokens, cache_salt=salt)


@pytest.mark.req("HSH-05")
@pytest.mark.parametrize(("num_tokens", "num_names"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_of_four_are_named(num_tokens: int, num_names: int) -> None:
    assert len(names_of(list(range(num_tokens)))) == num_names


@pytest.mark.req("HSH-04")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(0, 11))
def test_a_name_depends_on_every_token_before_it(tokens: list[int], changed: int) -> None:
    others = list(tokens)
    others[changed] += 1
    names, other_names = names_of(tokens), names_of(others)
    first = changed // 4
    assert names[:first] == other_names[:first]
    assert all(a != b for a, b in zip(names[first:], other_names[first:], strict=True))


@pytest.mark.req("HSH-04")
def test_same_tokens_behind_another_prefix_have_another_name() -> None:
    assert names_of([1, 2, 3, 4, 9, 9, 9, 9])[1] != names_of([5, 6, 7, 8, 9, 9, 9, 9])[1]
    assert names_of([9, 9, 9, 9])[0] != names_of([1, 2, 3, 4, 9, 9, 9, 9])[1]


def test_a_salt_changes_all_names_and_enters_only_the_first_block() -> None:
    tokens = list(range(12))
    plain = names_of(tokens)
    salted, other = names_of(tokens, cache_salt="a"), names_of(tokens, cache_salt="b")
    for names in zip(plain, salted, other, strict=True):
        assert len(set(names)) == 3
    hasher = BlockHasher(4, SEED)
    continued = salted[:1]
    hasher.extend(continued, np.array(tokens, np.int32))  # without the salt
    assert continued == salted


def test_an_empty_salt_is_a_salt() -> None:
    assert names_of([1, 2, 3, 4], cache_salt="") != names_of([1, 2, 3, 4])


@pytest.mark.req("HSH-07")
def test_names_of_two_deployments_differ_and_those_of_one_agree() -> None:
    tokens = list(range(8))
    assert names_of(tokens, seed=b"one") == names_of(tokens, seed=b"one")
    assert not set(names_of(tokens, seed=b"one")) & set(names_of(tokens, seed=b"two"))
    assert BlockHasher(4, b"one").none_hash != BlockHasher(4, b"two").none_hash


@pytest.mark.req("HSH-07")
def test_another_process_gives_the_same_names() -> None:
    program = (
        "import numpy as np; from longshore.scheduler.block_hash import BlockHasher; names = []; "
        f"BlockHasher(4, {SEED!r}).extend(names, np.arange(8, dtype=np.int32), cache_salt='s'); "
        "print(*(name.hex() for name in names))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert printed.split() == [n.hex() for n in names_of(list(range(8)), cache_salt="s")]


@pytest.mark.req("HSH-01")
@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=40), st.integers(0, 2**32 - 1))
def test_a_key_is_name_and_group_and_gives_both_back(name: bytes, group: int) -> None:
    key = block_key(name, group)
    assert key == name + struct.pack(">I", group)
    assert split_block_key(key) == (name, group)


def test_xxh3_names_are_the_same_chain_of_shorter_hashes() -> None:
    hasher = BlockHasher(4, SEED, "xxh3-128")
    names: list[bytes] = []
    hasher.extend(names, np.arange(8, dtype=np.int32))
    first = xxhash.xxh3_128_digest(hasher.none_hash + struct.pack("<4i", 0, 1, 2, 3))
    assert names == [first, xxhash.xxh3_128_digest(first + struct.pack("<4i", 4, 5, 6, 7))]
    assert {len(name) for name in names} == {16}


def test_an_unknown_algorithm_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="hash_algorithm='md5' is unknown; use 'sha256' or"):
        BlockHasher(4, SEED, "md5")
