"""Routing policies: which of the engines that may take a request gets it.

`round_robin`       the next one in turn.
`least_loaded`      the one with the lowest load.
`prefix_aware`      the one with the lowest load, minus a credit for the prefix that it has.
`session_affinity`  the same engine for all requests with one session key, as long as it is not much
                    more loaded than the others. Requests without a key: the least loaded one.

A policy sees no clock and no socket. Equally good engines take turns.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

import numpy as np

from longshore.deploy.gateway.router.block_index import BlockIndex, PromptHashes
from longshore.deploy.gateway.router.engine_loads import TOKENS_PER_REQUEST
from longshore.protocol.requests import RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.kv_cache.block_hash import BlockHasher, ExtraKeys

PolicyName: TypeAlias = Literal["least_loaded", "round_robin", "prefix_aware", "session_affinity"]
POLICY_NAMES: Final[tuple[PolicyName, ...]] = get_args(PolicyName)

Reason: TypeAlias = Literal[
    "turn", "load", "unknown", "prefix", "prefix_overloaded", "session", "session_overloaded"
]
"""Why an engine was chosen; a label of metrics.

turn:   it was its turn.
load:   it was the least loaded one; no prefix or session was known.
unknown: as `load`, while it is not known what all engines have.
prefix: no engine has a longer prefix of the prompt.
prefix_overloaded: another engine has a longer prefix, but is too loaded.
session, session_overloaded: the session's own engine, or another one because that is too loaded.
"""
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)

MAX_PREFIX_BLOCKS: Final = 2048
"""Blocks of a prompt in which a common prefix is searched; to hash one takes 0.5 µs."""
PREFIX_WEIGHT: Final = 2.0
"""Load for which a cached token makes up, in tokens to compute. It is more than 1 because a prefix
that is found saves the time of those that wait, too. On the traces of `benchmarks/routing.py` with
4 engines, 1, 2, 4 and 16 find 0.281, 0.311, 0.334 and 0.354 of the prompt tokens (conversation) and
0.600, 0.637, 0.644 and 0.650 (synthetic), one engine with all memory 0.359 and 0.650. But the
higher it is, the more requests with one common prefix go to one engine while others are idle."""
MAX_EXCESS: Final = 1.25
"""A session stays where the load is at most this multiple of the mean, plus one request."""

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX: Final = 0xD6E8FEB86659FD93
_64_BITS: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What a policy sees of a request.

    extra_keys:  what its block hashes cover in addition to tokens.
    uses_prefix: it looks up the prefix cache.
    session_key: requests with the same one belong together.
    """

    token_ids: Sequence[int]
    extra_keys: ExtraKeys | None = None
    uses_prefix: bool = True
    session_key: str | None = None


def extra_keys_of(options: RequestOptions) -> ExtraKeys | None:
    """What a request's block hashes cover in addition to tokens."""
    if options.cache_salt is None and not options.multimodal:
        return None
    return ExtraKeys(cache_salt=options.cache_salt, multimodal=options.multimodal)


def can_reuse(sampling: SamplingParams, options: RequestOptions) -> bool:
    """Whether a request may start from a cached prefix: not if each prompt token has a result."""
    if options.skip_reading_prefix_cache:
        return False
    if options.pooling is not None:
        return not options.pooling.needs_all_states
    return sampling.prompt_logprobs is None


class Decision(NamedTuple):
    """num_cached_tokens: leading tokens of the prompt whose KV the engine probably has.
    next_hashes: of some blocks after them, which the engine is going to compute."""

    engine: int
    reason: Reason
    num_cached_tokens: int = 0
    next_hashes: Sequence[bytes] = ()


_ValueT_co = TypeVar("_ValueT_co", covariant=True)


class ByEngine(Protocol[_ValueT_co]):
    """A value per engine, by number."""

    def __getitem__(self, engine: int, /) -> _ValueT_co: ...


class RoutingPolicy(ABC):
    """One policy of one gateway."""

    @abstractmethod
    def choose(
        self, prompt: RoutedPrompt, engines: Sequence[int], loads: ByEngine[float]
    ) -> Decision:
        """engines: those that may take it, at least one, in the order in which it is their turn.
        loads: theirs."""


class RoundRobin(RoutingPolicy):
    def choose(
        self, prompt: RoutedPrompt, engines: Sequence[int], loads: ByEngine[float]
    ) -> Decision:
        return Decision(engines[0], "turn")


class LeastLoaded(RoutingPolicy):
    def choose(
        self, prompt: RoutedPrompt, engines: Sequence[int], loads: ByEngine[float]
    ) -> Decision:
        return Decision(min(engines, key=loads.__getitem__), "load")


class SessionAffinity(RoutingPolicy):
    """Rendezvous hashing with bounded loads (Thaler and Ravishankar, 1998; Mirrokni et al., 2018).
    It needs no memory, so all gateways agree, and an engine that is lost or added moves only its
    own sessions."""

    def choose(
        self, prompt: RoutedPrompt, engines: Sequence[int], loads: ByEngine[float]
    ) -> Decision:
        if prompt.session_key is None:
            return Decision(min(engines, key=loads.__getitem__), "load")
        digest = hashlib.blake2b(prompt.session_key.encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "big")
        ranked = sorted(engines, key=lambda engine: _weight(key, engine), reverse=True)
        maximum = MAX_EXCESS * sum(loads[engine] for engine in engines) / len(engines) + 1
        for engine in ranked:
            if loads[engine] <= maximum:
                return Decision(engine, "session" if engine == ranked[0] else "session_overloaded")
        raise AssertionError("some load is at most the mean")


def _weight(key: int, engine: int) -> int:
    """A number that looks random; the same in every process."""
    mixed = ((key ^ (engine + 1) * _GOLDEN) * _MIX) & _64_BITS
    mixed = ((mixed ^ mixed >> 32) * _MIX) & _64_BITS
    return mixed ^ mixed >> 32


class PrefixAware(RoutingPolicy):
    """index: what the engines have. hasher: hashes blocks as the engines do."""

    def __init__(self, index: BlockIndex, hasher: BlockHasher) -> None:
        self.index = index
        self._hasher = hasher

    def choose(
        self, prompt: RoutedPrompt, engines: Sequence[int], loads: ByEngine[float]
    ) -> Decision:
        if not prompt.uses_prefix:
            return Decision(min(engines, key=loads.__getitem__), "load")
        chain = self._hashes_of(prompt)
        cached = self.index.match(chain, engines)
        credit = PREFIX_WEIGHT / TOKENS_PER_REQUEST
        costs = {each: loads[each] - cached.get(each, 0) * credit for each in engines}
        chosen = min(engines, key=costs.__getitem__)
        num_cached = cached.get(chosen, 0)
        reason: Reason = "load"
        if not all(map(self.index.is_known.__getitem__, engines)):
            reason = "unknown"
        elif cached:
            reason = "prefix" if num_cached == max(cached.values()) else "prefix_overloaded"
        num_blocks = num_cached // self._hasher.block_size
        next_hashes = tuple(chain.hashes[num_blocks : num_blocks + PromptHashes.PART])
        return Decision(chosen, reason, num_cached, next_hashes)

    def _hashes_of(self, prompt: RoutedPrompt) -> PromptHashes:
        size = self._hasher.block_size
        # The last token of a prompt is always computed.
        num_blocks = min((len(prompt.token_ids) - 1) // size, MAX_PREFIX_BLOCKS)
        tokens = np.empty(max(0, num_blocks) * size, np.int32)

        def hash_more(hashes: list[bytes], count: int) -> None:
            first, last = len(hashes) * size, count * size
            tokens[first:last] = prompt.token_ids[first:last]
            self._hasher.extend(hashes, tokens[:last], prompt.extra_keys)

        return PromptHashes(max(0, num_blocks), hash_more)
