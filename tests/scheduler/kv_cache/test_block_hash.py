"""Block hashes: recomputed here with hashlib from the documented layout."""

import hashlib
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.errors import ConfigError
from longshore.protocol.requests import (
    AddRequest,
    LoRARequest,
    MultimodalFeature,
    PromptEmbeds,
    RequestOptions,
)
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.kv_cache.block_hash import (
    BlockHasher,
    ExtraKeys,
    block_key,
)
from longshore.scheduler.request import Request

SEED = b"a deployment's seed"
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def names_of(
    tokens: list[int], *, block_size: int = 4, seed: bytes = SEED, **keys: Any
) -> list[bytes]:
    names: list[bytes] = []
    extra_keys = ExtraKeys(**keys) if any(key is not None for key in keys.values()) else None
    BlockHasher(block_size, seed).extend(names, np.array(tokens, np.int32), extra_keys)
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
def test_hashes_are_the_documented_chain(
    tokens: list[int], block_size: int, salt: str | None
) -> None:
    names = names_of(tokens, block_size=block_size, cache_salt=salt)
    assert names == names_by_hand(tokens, block_size, salt, SEED)


@pytest.mark.req("HSH-05")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(token_ids, st.lists(st.integers(0, 40), max_size=5), st.none() | st.just("salt"))
def test_hashing_in_pieces_equals_hashing_at_once(
    tokens: list[int], pieces: list[int], salt: str | None
) -> None:
    hasher = BlockHasher(4, SEED)
    extra_keys = None if salt is None else ExtraKeys(cache_salt=salt)
    names: list[bytes] = []
    for end in sorted(min(piece, len(tokens)) for piece in pieces):
        before = list(names)
        hasher.extend(names, np.array(tokens[:end], np.int32), extra_keys)
        assert names[: len(before)] == before
        assert len(names) == end // 4
    hasher.extend(names, np.array(tokens, np.int32), extra_keys)
    assert names == names_of(tokens, cache_salt=salt)


@pytest.mark.req("HSH-05")
@pytest.mark.parametrize(("num_tokens", "num_names"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_of_four_are_hashed(num_tokens: int, num_names: int) -> None:
    assert len(names_of(list(range(num_tokens)))) == num_names


@pytest.mark.req("HSH-04")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(0, 11))
def test_a_hash_depends_on_every_token_before_it(tokens: list[int], changed: int) -> None:
    others = list(tokens)
    others[changed] += 1
    names, other_names = names_of(tokens), names_of(others)
    first = changed // 4
    assert names[:first] == other_names[:first]
    assert all(a != b for a, b in zip(names[first:], other_names[first:], strict=True))


@pytest.mark.req("HSH-04")
def test_same_tokens_after_another_prefix_have_another_name() -> None:
    assert names_of([1, 2, 3, 4, 9, 9, 9, 9])[1] != names_of([5, 6, 7, 8, 9, 9, 9, 9])[1]
    assert names_of([9, 9, 9, 9])[0] != names_of([1, 2, 3, 4, 9, 9, 9, 9])[1]


@pytest.mark.parametrize("salt", [None, "a"])
def test_requests_that_are_not_stored_have_hashes_of_their_own(salt: str | None) -> None:
    names = [
        names_of(list(range(12)), cache_salt=salt, no_store=value) for value in (False, True, True)
    ]
    assert set(names[0]).isdisjoint(names[1])
    assert names[1] == names[2]


def test_a_salt_changes_all_hashes_and_enters_only_the_first_block() -> None:
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
def test_hashes_of_two_deployments_differ_and_those_of_one_agree() -> None:
    tokens = list(range(8))
    assert names_of(tokens, seed=b"one") == names_of(tokens, seed=b"one")
    assert not set(names_of(tokens, seed=b"one")) & set(names_of(tokens, seed=b"two"))
    assert BlockHasher(4, b"one").none_hash != BlockHasher(4, b"two").none_hash


@pytest.mark.req("HSH-07")
def test_another_process_gives_the_same_hashes() -> None:
    program = (
        "import numpy as np; from longshore.scheduler.kv_cache.block_hash import *; names = []; "
        "keys = ExtraKeys(cache_salt='s'); "
        f"BlockHasher(4, {SEED!r}).extend(names, np.arange(8, dtype=np.int32), keys); "
        "print(*(name.hex() for name in names))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert printed.split() == [n.hex() for n in names_of(list(range(8)), cache_salt="s")]


@pytest.mark.req("HSH-01")
@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=40), st.integers(0, 2**32 - 1))
def test_a_key_is_hash_and_group(name: bytes, group: int) -> None:
    key = block_key(name, group)
    assert key == name + struct.pack(">I", group)
    assert (key[:-4], struct.unpack(">I", key[-4:])[0]) == (name, group)


def test_xxh3_gives_the_same_chain_with_shorter_hashes() -> None:
    hasher = BlockHasher(4, SEED, "xxh3-128")
    names: list[bytes] = []
    hasher.extend(names, np.arange(8, dtype=np.int32))
    first = xxhash.xxh3_128_digest(hasher.none_hash + struct.pack("<4i", 0, 1, 2, 3))
    assert names == [first, xxhash.xxh3_128_digest(first + struct.pack("<4i", 4, 5, 6, 7))]
    assert {len(name) for name in names} == {16}


def test_an_unknown_algorithm_is_rejected_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="hash_algorithm='md5' is unknown; use 'sha256' or"):
        BlockHasher(4, SEED, "md5")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=5), st.sampled_from([1, 4]))
def test_naming_one_block_of_many_chains_is_naming_each_alone(
    chains: list[list[int]], block_size: int
) -> None:
    for algorithm in ("sha256", "xxh3-128"):
        hasher = BlockHasher(block_size, SEED, algorithm)
        together: list[list[bytes]] = [[] for _ in chains]
        for tokens, names in zip(chains, together, strict=True):
            hasher.extend(names, np.array(tokens, np.int32))
        alone = [list(names) for names in together]
        blocks = np.arange(len(chains) * block_size, dtype=np.int32).reshape(-1, block_size)
        added = hasher.extend_each(together, blocks)
        for tokens, names, block in zip(chains, alone, blocks, strict=True):
            full = tokens[: len(names) * block_size]
            hasher.extend(names, np.array([*full, *block], np.int32))
        assert together == alone
        assert added == [names[-1] for names in together]


def item(content: str, offset: int, num_tokens: int) -> MultimodalFeature:
    return MultimodalFeature(content, offset, num_tokens)


@pytest.mark.req("HSH-06")
def test_an_adapter_changes_all_hashes_and_is_no_salt() -> None:
    tokens = list(range(12))
    variants = [
        names_of(tokens),
        names_of(tokens, lora_name="a"),
        names_of(tokens, lora_name="b"),
        names_of(tokens, cache_salt="a"),
        names_of(tokens, lora_name="a", cache_salt="a"),
        names_of(tokens, lora_name="a", cache_salt="b"),
    ]
    for names in zip(*variants, strict=True):
        assert len(set(names)) == len(variants)


@pytest.mark.req("HSH-06", "ERR-23")
@pytest.mark.parametrize(
    ("offset", "num_tokens", "first_changed"),
    [(0, 1, 0), (3, 1, 0), (3, 2, 0), (4, 1, 1), (7, 6, 1), (8, 4, 2), (15, 1, 3), (16, 3, 4)],
)
def test_an_item_enters_the_blocks_it_overlaps_and_through_the_chain_those_after(
    offset: int, num_tokens: int, first_changed: int
) -> None:
    tokens = list(range(16))
    plain = names_of(tokens)
    names = names_of(tokens, multimodal=(item("cat", offset, num_tokens),))
    assert names[:first_changed] == plain[:first_changed]
    assert not set(names[first_changed:]) & set(plain)


@pytest.mark.req("HSH-06")
def test_items_are_told_apart_by_content_and_by_where_they_start() -> None:
    tokens = [7] * 12
    variants = [
        (item("cat", 4, 4),),
        (item("dog", 4, 4),),
        (item("cat", 5, 3),),
        (item("cat", 4, 2), item("dog", 6, 2)),
        (item("cat", 4, 2), item("cat", 6, 2)),
        (item("dog", 4, 2), item("cat", 6, 2)),
    ]
    seconds = {names_of(tokens, multimodal=items)[1] for items in variants}
    assert len(seconds) == len(variants)
    firsts = {names_of(tokens, multimodal=items)[0] for items in variants}
    assert len(firsts) == 1


def overlapping(items: tuple[MultimodalFeature, ...], first: int, last: int) -> list[bytes]:
    return [
        part
        for one in items
        if one.offset < last and one.offset + one.num_tokens > first
        for part in (b"item", one.hash.encode(), struct.pack(">Q", one.offset))
    ]


@pytest.mark.req("HSH-06", "ERR-23")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=4),
    st.integers(0, 30),
    st.integers(1, 12),
)
def test_a_block_has_the_keys_of_exactly_the_items_it_overlaps(
    gaps_and_lengths: list[tuple[int, int]], first: int, length: int
) -> None:
    items: list[MultimodalFeature] = []
    end = 0
    for gap, num_tokens in gaps_and_lengths:
        items.append(item(f"h{len(items)}", end + gap, num_tokens))
        end += gap + num_tokens
    keys = ExtraKeys(multimodal=tuple(items))
    parts = overlapping(tuple(items), first, first + length)
    assert keys.frame(first, first + length) == b"".join(
        struct.pack(">I", len(part)) + part for part in parts
    )
    if first >= keys.num_tokens:
        assert parts == []


@pytest.mark.req("HSH-06")
def test_embeddings_are_hashed_with_their_blocks_and_not_with_later_output() -> None:
    def embeds(last_value: int) -> PromptEmbeds:
        data = np.zeros((6, 2), np.float32)
        data[5] = last_value
        return PromptEmbeds(data.view(np.uint8).reshape(-1), 2, "float32")

    tokens = [0] * 12
    one, same, other = (names_of(tokens, prompt_embeds=embeds(value)) for value in (1, 1, 2))
    assert one == same
    assert one[0] == other[0] != names_of(tokens)[0]  # the first four rows are equal
    assert one[1] != other[1]
    assert ExtraKeys(prompt_embeds=embeds(1)).num_tokens == 6
    assert ExtraKeys(prompt_embeds=embeds(1)).frame(8, 12) == b""


@pytest.mark.req("HSH-06")
def test_extra_keys_are_made_once_per_request_and_only_where_there_are_any() -> None:
    def request_of(**fields: Any) -> Request:
        message = AddRequest(
            "r", 0, np.arange(8, dtype=np.int32), SamplingParams(), RequestOptions(**fields)
        )
        return Request(message, client_index=0, now=0.0, max_model_len=64, eos_token_ids=())

    assert request_of().extra_keys is None
    for fields in (
        {"cache_salt": ""},
        {"lora": LoRARequest("a")},
        {"multimodal": (item("cat", 0, 2),)},
        {"prompt_embeds": PromptEmbeds(np.zeros(64, np.uint8), 2, "float32")},
    ):
        request = request_of(**fields)
        keys = request.extra_keys
        assert keys is not None
        assert keys.frame(0, 4) != b""
