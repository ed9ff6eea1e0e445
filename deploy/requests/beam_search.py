"""Beam search on the client's side, with forks of requests.

Each beam is a request for one token and the log probabilities of the next candidates. It keeps its
blocks after that token, so that the beams of the next step, which are its forks, compute one token
each and copy at most one block. The scheduler does not know about the search.

Candidates, scores and the end condition equal those of transformers' `generate(num_beams=...)`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from longshore.deploy.requests.errors import check_end
from longshore.deploy.requests.live_requests import LiveRequest, RequestClient
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import NO_OPTIONS, RequestOptions
from longshore.protocol.sampling import MAX_LOGPROBS, SamplingParams


@dataclass(frozen=True)
class BeamSearchParams:
    """Settings of a search. Raises ValueError naming a setting that is out of range.

    beam_width:     number of beams.
    max_tokens:     maximum number of output tokens.
    length_penalty: a finished beam's score is its log probability / length ** length_penalty: above
                    0 prefers longer answers, below 0 shorter ones.
    early_stopping: True ends the search when `beam_width` beams have finished; False when no live
                    beam is better than the worst of them now; "never" when no live beam could
                    become better within `max_tokens`.
    end_token_ids:  tokens that finish a beam and are part of it.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    end_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.beam_width < 1:
            raise ValueError(f"beam_width={self.beam_width} must be at least 1")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty={self.length_penalty} must be a finite number")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f'early_stopping={self.early_stopping!r}: use True, False or "never"')
        if self.num_candidates > MAX_LOGPROBS:
            raise ValueError(
                f"beam_width={self.beam_width} with {len(self.end_token_ids)} end tokens needs "
                f"{self.num_candidates} candidates per step, but at most {MAX_LOGPROBS} are "
                f"reported; use at most {MAX_LOGPROBS // self._candidates_per_beam}"
            )

    @property
    def _candidates_per_beam(self) -> int:
        return max(2, 1 + len(self.end_token_ids))

    @property
    def num_candidates(self) -> int:
        """Candidates per step: enough that at least `beam_width` of them do not end."""
        return self._candidates_per_beam * self.beam_width


@dataclass(frozen=True)
class Beam:
    """token_ids: output so far. logprob: sum over them, float32. parent: index of the previous
    step's beam. has_ended: it ends with an end token."""

    token_ids: tuple[int, ...]
    logprob: np.float32
    parent: int = 0
    has_ended: bool = False


@dataclass(frozen=True)
class FinishedBeam:
    """score: log probability with the length penalty applied."""

    beam: Beam
    score: float

    @property
    def reason(self) -> FinishReason:
        return FinishReason.STOPPED if self.beam.has_ended else FinishReason.LENGTH_CAPPED

    @property
    def text_token_ids(self) -> Sequence[int]:
        """Without the token that ended it."""
        return self.beam.token_ids[:-1] if self.beam.has_ended else self.beam.token_ids


class BeamTree:
    """The search without I/O: takes candidates, chooses beams.

    beams:    live beams, most likely first; empty once the search is over.
    finished: at most `beam_width` finished beams, best first.
    """

    def __init__(self, params: BeamSearchParams) -> None:
        self._params = params
        self._num_tokens = 0
        self.beams = [Beam((), np.float32(0))]
        self.finished: list[FinishedBeam] = []

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Grow all beams by one token. candidates: per beam, (token id, log probability) of its
        most likely next tokens, `num_candidates` of them or the whole vocabulary."""
        params, width = self._params, self._params.beam_width
        self._num_tokens += 1
        is_last = self._num_tokens == params.max_tokens
        grown = [
            Beam(
                (*beam.token_ids, token_id),
                beam.logprob + np.float32(logprob),
                index,
                token_id in params.end_token_ids,
            )
            for index, (beam, found) in enumerate(zip(self.beams, candidates, strict=True))
            for token_id, logprob in found
        ]
        grown.sort(key=lambda beam: -beam.logprob)
        best = grown[: params.num_candidates]
        # A beam only finishes if it is among the best `width`; the others replace finished beams.
        ending = [beam for beam in best[:width] if beam.has_ended or is_last]
        self.finished += [FinishedBeam(beam, self._score(beam.logprob)) for beam in ending]
        self.finished.sort(key=lambda finished: -finished.score)
        del self.finished[width:]
        self.beams = [beam for beam in best if not beam.has_ended][:width]
        if is_last or not self.beams or self._is_decided():
            self.beams = []

    def _score(self, logprob: np.float32, num_tokens: int | None = None) -> float:
        length = self._num_tokens if num_tokens is None else num_tokens
        return float(logprob / np.float32(length**self._params.length_penalty))

    def _is_decided(self) -> bool:
        """True if no live beam can become one of the best."""
        params = self._params
        if len(self.finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        num_tokens = self._num_tokens
        if params.early_stopping == "never" and params.length_penalty > 0:
            num_tokens = params.max_tokens
        return self._score(self.beams[0].logprob, num_tokens) <= self.finished[-1].score


class BeamSearch:
    """One prompt's search, a `Part` of an `EngineRun`. Always `close` it."""

    def __init__(
        self,
        client: RequestClient,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        options: RequestOptions = NO_OPTIONS,
    ) -> None:
        self._client = client
        self._request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._options = msgspec.structs.replace(options, resumable=True, keeps_blocks=True)
        self._sampling = SamplingParams(
            temperature=0.0,
            seed=0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=params.num_candidates,
        )
        self._tree = BeamTree(params)
        self._live: list[LiveRequest] = []
        self._num_requests = 0
        self.num_cached_tokens = 0

    def start(self, on_change: Callable[[], None]) -> None:
        """Submit the first request. Raises EngineDead."""
        self._on_change = on_change
        self._send([])

    @property
    def is_over(self) -> bool:
        return not self._tree.beams

    @property
    def finished(self) -> Sequence[FinishedBeam]:
        """Once the search is over: the best beams, best first."""
        return self._tree.finished

    def advance(self) -> bool:
        """Start the next step if all beams have finished; returns whether they have. Raises
        RequestError, EngineDead."""
        for live in self._live:
            if live.failure is not None:
                raise live.failure
            if live.finished is not None:
                check_end(live.finished)
        if self.is_over or any(live.is_live for live in self._live):
            return False
        if self._num_requests == 1:
            (root,) = self._live
            self.num_cached_tokens = 0 if root.finished is None else root.finished.num_cached_tokens
        candidates = []
        for live in self._live:
            (score,) = live.take_scores(len(live.take_token_ids()))
            candidates.append(score.best)
        self._tree.advance(candidates)
        parents = self._live
        try:
            self._send(parents)
        finally:
            self._client.abort(parents)  # after their forks, which then hold the blocks they need
        return True

    def _send(self, parents: Sequence[LiveRequest]) -> None:
        self._live = []
        for beam in self._tree.beams:
            self._num_requests += 1
            self._live.append(
                self._client.submit(
                    f"{self._request_id}-{self._num_requests}",
                    [*self.prompt_token_ids, *beam.token_ids],
                    self._sampling,
                    self._options,
                    on_change=self._on_change,
                    fork_of=parents[beam.parent] if parents else None,
                )
            )

    def close(self) -> None:
        """Abort all live requests."""
        self._client.abort(self._live)
        self._live = []
