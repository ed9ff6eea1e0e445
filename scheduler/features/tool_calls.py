"""How long the tools that agents call take, learned from the gaps between the turns of their jobs.

The name of the tool is read from the end of a turn's output. The gap of a call is the time from the
end of its turn to the arrival of the job's next one. After the estimator of Continuum (arXiv
2511.02230); `choose_ttl` differs from it, see docs/agents.md.
"""

import logging
import math
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

Decoder: TypeAlias = Callable[[list[int]], str]
"""The text of token ids, with special tokens."""

DEFAULT_TTL_S: Final = 10.0
"""Of a pin, while too little is known about its tool."""

MIN_CALLS: Final = 5
"""Calls whose gaps are a distribution to choose by."""

MARGIN: Final = 1.25
"""A pin lasts for a quarter longer than an observed gap, because the next one varies."""

MAX_TOOLS: Final = 256
MAX_JOBS: Final = 4096
MAX_CALLS_OF_TOOL: Final = 128
MAX_CALLS_OF_JOB: Final = 32
MAX_READ_TOKENS: Final = 512
_NAME = r"([\w.:/-]{1,64})"
_CALLS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rf'\{{\s*"name"\s*:\s*"{_NAME}"\s*,\s*"(?:arguments|parameters)"',
        rf"<function={_NAME}>",
        rf"\bto=functions\.{_NAME}",
        rf'<invoke name="{_NAME}">',
        rf"<tool_call>{_NAME}\s*</?(?:arg_key|tool_call)>",
        r"<\|tool_call_begin\|>functions\.([\w./-]{1,64})",
        rf"<\|tool_call>call:{_NAME}\{{",
        # The command of a code block, after those that only change the folder.
        rf"```(?:bash|sh|shell)[^\S\n]*\n\s*(?:cd\s[^\n]*?(?:&&|;|\n)\s*)*{_NAME}",
    )
)

logger = logging.getLogger(__name__)


def load_decoder(policy: str, tokenizer_file: str | None) -> Decoder | None:
    """A decoder for the policy `continuum`. None for other policies, and for a tokenizer that
    cannot be read, which is only worth a warning."""
    if policy != "continuum" or tokenizer_file is None:
        return None
    try:
        from tokenizers import Tokenizer  # loaded with this policy only

        tokenizer = Tokenizer.from_file(tokenizer_file)
    except Exception as error:  # the library raises bare Exception
        logger.warning(
            "%s cannot be read (%s), so it is not known which tools agents call; the gaps of all "
            "tools are taken together",
            tokenizer_file,
            error,
        )
        return None
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def tool_name(text: str) -> str | None:
    """The last tool that a model's output calls; for a shell code block, the command's name."""
    found = [match for pattern in _CALLS for match in pattern.finditer(text)]
    return max(found, key=re.Match.start)[1] if found else None


class TTL(NamedTuple):
    """How long to keep the KV of a turn for the next one; 0: not at all.
    probability: that the next turn arrives within that time."""

    seconds: float
    probability: float


_NO_PIN: Final = TTL(0.0, 0.0)


def choose_ttl(gaps: Sequence[float], *, saved_s: float, share: float, max_ttl_s: float) -> TTL:
    """The time to live with the largest expected gain, in seconds of the engine: a turn that
    arrives in time saves `saved_s`, and memory costs its `share` of the engine's for as long as it
    is held.

    gaps: observed ones; infinite if no turn followed.
    """
    gaps = sorted(gaps)
    best, best_gain, held_s = _NO_PIN, 0.0, 0.0
    num_within = 0
    for gap in gaps:
        ttl_s = gap * MARGIN
        if ttl_s > max_ttl_s:
            break
        while num_within < len(gaps) and gaps[num_within] <= ttl_s:
            held_s += gaps[num_within]
            num_within += 1
        mean_held_s = (held_s + (len(gaps) - num_within) * ttl_s) / len(gaps)
        probability = num_within / len(gaps)
        gain = probability * saved_s - share * mean_held_s
        if gain > best_gain:
            best, best_gain = TTL(ttl_s, probability), gain
    return best


@dataclass(slots=True)
class _Call:
    """The end of a turn. gap_s: None while no other turn of the job has arrived; NaN if several
    had ended by then, and this was not the last of them."""

    tool: str | None
    ended_s: float
    gap_s: float | None = None


@dataclass(slots=True)
class _Job:
    """calls: the newest ones. open: those that no turn has followed; several, if turns of the job
    have run at the same time."""

    calls: deque[_Call] = field(default_factory=lambda: deque(maxlen=MAX_CALLS_OF_JOB))
    open: deque[_Call] = field(default_factory=lambda: deque(maxlen=MAX_CALLS_OF_JOB))


class ToolCallEstimator:
    """The gaps of the last calls, by tool and by job. Its size is bounded.

    decode: None, or fails: all calls are those of one unknown tool.
    """

    def __init__(self, decode: Decoder | None) -> None:
        self._decode = decode
        self._has_warned = False
        self._calls: deque[_Call] = deque(maxlen=MAX_CALLS_OF_TOOL)
        self._tools: OrderedDict[str | None, deque[_Call]] = OrderedDict()
        self._jobs: OrderedDict[str, _Job] = OrderedDict()

    def turn_arrived(self, job_id: str, arrived_s: float) -> None:
        """A turn of a job has arrived: it ends the gap that the newest turn has begun. Other open
        gaps are forgotten, because perhaps no turn follows those, as after a request with n = 2."""
        job = self._jobs.get(job_id)
        if job is not None and job.open:
            call = job.open.pop()
            call.gap_s = max(arrived_s - call.ended_s, 0.0)
            while job.open:
                job.open.pop().gap_s = math.nan

    def turn_ended(self, job_id: str, output_ids: Sequence[int], now: float) -> None:
        """A turn of a job has ended, and is not the last one."""
        call = _Call(self._read_tool(output_ids), now)
        job = self._jobs.setdefault(job_id, _Job())
        self._jobs.move_to_end(job_id)
        of_tool = self._tools.setdefault(call.tool, deque(maxlen=MAX_CALLS_OF_TOOL))
        self._tools.move_to_end(call.tool)
        for calls in (self._calls, of_tool, job.calls, job.open):
            calls.append(call)
        if len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        if len(self._tools) > MAX_TOOLS:
            self._tools.popitem(last=False)

    def job_ended(self, job_id: str) -> None:
        """The job's last turn has ended."""
        self._jobs.pop(job_id, None)

    def predict(
        self, job_id: str, now: float, *, saved_s: float | None, share: float, max_ttl_s: float
    ) -> TTL:
        """How long to keep the KV of the turn with which `turn_ended` was called last; see
        `choose_ttl`. saved_s: None: not known yet."""
        gaps = self._gaps(job_id, now, max_ttl_s)
        if gaps is not None and min(gaps) > max_ttl_s:
            return _NO_PIN
        if gaps is None or saved_s is None:
            return TTL(min(DEFAULT_TTL_S, max_ttl_s), 0.5)
        return choose_ttl(gaps, saved_s=saved_s, share=share, max_ttl_s=max_ttl_s)

    def _gaps(self, job_id: str, now: float, max_ttl_s: float) -> list[float] | None:
        """Gaps like that which begins now: of the job's own calls of this tool, of all calls of the
        tool, or of all calls, the first of which there are enough."""
        of_job = self._jobs[job_id].calls
        tool = of_job[-1].tool
        own = [call for call in of_job if call.tool == tool]
        for calls in (own, self._tools[tool], self._calls):
            gaps = [call.gap_s for call in calls if call.gap_s is not None and call.gap_s >= 0]
            # A turn that has not come within the longest time to live counts as one that never
            # comes; of the others that have not come, nothing is known.
            num_late = sum(call.gap_s is None and now - call.ended_s > max_ttl_s for call in calls)
            if len(gaps) + num_late >= MIN_CALLS:
                return gaps + [math.inf] * num_late
        return None

    def _read_tool(self, output_ids: Sequence[int]) -> str | None:
        if self._decode is None:
            return None
        try:
            return tool_name(self._decode(list(output_ids[-MAX_READ_TOKENS:])))
        except Exception:
            if not self._has_warned:
                self._has_warned = True
                logger.exception(
                    "the output of an agent's turn could not be decoded, so it is not known which "
                    "tool it calls; the gaps of all tools are taken together (logged once)"
                )
            return None
