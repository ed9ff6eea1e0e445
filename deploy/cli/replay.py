"""`longshore replay`: repeats a record of the scheduler, compares its plans, explains a request."""

import logging
from pathlib import Path

from longshore.scheduler.recorder.explain import Explainer
from longshore.scheduler.recorder.replay import Replay, Result


def replay(file: Path, *, until: int | None, explain: str | None, policy: str | None) -> int:
    """Print what the replay finds; returns the exit status. Raises RecordError."""
    explainer = None if explain is None else Explainer(explain)
    logging.getLogger("longshore.scheduler").setLevel(logging.CRITICAL)  # all happened before
    repeating = Replay(
        file,
        policy=policy,
        until=until,
        before=None if explainer is None else explainer.before,
        after=None if explainer is None else explainer.after,
    )
    result = repeating.run()
    if explainer is not None:
        _print_timeline(explainer, explain or "")
    for line in describe(result):
        print(line)
    return 0 if result.is_equal else 1


def _print_timeline(explainer: Explainer, request_id: str) -> None:
    if not explainer.timeline:
        print(f"no request {request_id!r} in this part of the record")
        return
    started_s = explainer.timeline[0].now
    for happening in explainer.timeline:
        print(f"step {happening.step:>8}  {happening.now - started_s:10.3f} s  {happening.text}")


def describe(result: Result) -> list[str]:
    """The result in lines."""
    plans = "1 plan is" if result.num_plans == 1 else f"{result.num_plans:,} plans are"
    lines = [f"{plans} equal ({result.num_calls:,} calls repeated)"]
    if result.num_runs > 1:
        lines.append(f"the record is of {result.num_runs} processes")
    if result.is_cut:
        lines.append("the record ends within an entry, as after a process that was killed")
    if result.raised:
        lines.append(f"the last call raised {result.raised}, in the replay as well")
    lines += result.notes
    if result.difference is not None:
        lines.append(f"the first difference: {result.difference}")
    if result.policy_differs is not None:
        lines.append(
            f"the scheduling policy {result.policy!r} is not deterministic: {result.policy_differs}"
        )
    return lines
