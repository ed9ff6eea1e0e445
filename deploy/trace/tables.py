"""A scheduler trace as tables: one row per step, request and lookup."""

from pathlib import Path
from typing import Any, Final

import msgspec

from longshore.deploy.trace.reading import RequestLife, Step, Trace
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command


def export_parquet(trace: Trace, folder: Path) -> dict[str, int]:
    """Write `steps.parquet`, `requests.parquet` and `lookups.parquet`; returns their rows. Raises
    ConfigError without pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"an export to Parquet needs pyarrow; run {install_command('research')}"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, (rows, types) in _tables(trace).items():
        of = {"int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string()}
        of["bool"] = pyarrow.bool_()
        schema = pyarrow.schema([(column, of[kind]) for column, kind in types.items()])
        parquet.write_table(
            pyarrow.Table.from_pylist(rows, schema=schema), folder / f"{name}.parquet"
        )
        counts[name] = len(rows)
    return counts


def _tables(trace: Trace) -> dict[str, tuple[list[dict[str, Any]], dict[str, str]]]:
    return {
        "steps": ([_step_row(step) for step in trace.steps], STEP_TYPES),
        "requests": ([_request_row(life) for life in trace.requests], REQUEST_TYPES),
        "lookups": (
            [{"now_s": lookup.now, **msgspec.structs.asdict(lookup)} for lookup in trace.lookups],
            LOOKUP_TYPES,
        ),
    }


STEP_TYPES: Final = {
    "epoch": "int",
    "step": "int",
    "now_s": "float",
    "output_s": "float",
    "running": "int",
    "waiting": "int",
    "in_flight": "int",
    **{
        f"{tier}_{count}": "int" for tier in ("gpu", "cpu") for count in ("free", "total", "cached")
    },
    "pins": "int",
    "pinned_blocks": "int",
    "max_requests": "int",
    "max_tokens": "int",
    "tokens": "int",
    "prefill_tokens": "int",
    "new": "int",
    "resumed": "int",
    "preempted": "int",
}


def _step_row(step: Step) -> dict[str, Any]:
    snapshot, decision = step.snapshot, step.decision
    return {
        "epoch": decision.epoch,
        "step": decision.step,
        "now_s": decision.now,
        "output_s": step.output_s,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "in_flight": snapshot.in_flight,
        **{
            f"{tier}_{count}": getattr(blocks, count)
            for tier, blocks in (("gpu", snapshot.gpu), ("cpu", snapshot.cpu))
            for count in ("free", "total", "cached")
        },
        "pins": snapshot.pins.count,
        "pinned_blocks": snapshot.pins.blocks,
        "max_requests": snapshot.limits.requests,
        "max_tokens": snapshot.limits.tokens,
        "tokens": decision.tokens,
        "prefill_tokens": decision.prefill_tokens,
        "new": len(decision.new),
        "resumed": len(decision.resumed),
        "preempted": len(decision.preempted),
    }


REQUEST_TYPES: Final = {
    "request": "str",
    "job": "str",
    "queued_s": "float",
    "admitted_s": "float",
    "first_output_s": "float",
    "ended_s": "float",
    "reason": "str",
    "continues": "bool",
    "prompt_tokens": "int",
    "cached_tokens": "int",
    "output_tokens": "int",
    "preemptions": "int",
    "prefill_seconds": "float",
    "decode_seconds": "float",
    "preempted_seconds": "float",
}


def _request_row(life: RequestLife) -> dict[str, Any]:
    end = life.end
    row = {
        "request": life.request,
        "job": life.job,
        "queued_s": life.queued_s,
        "admitted_s": life.admitted_s,
        "first_output_s": life.first_output_s,
        "prompt_tokens": life.prompt_tokens,
        "preemptions": life.num_preemptions,
        "prefill_seconds": life.seconds_in("prefill"),
        "decode_seconds": life.seconds_in("decode"),
        "preempted_seconds": life.seconds_in("preempted"),
    }
    if end is not None:
        row |= {
            "ended_s": end.now,
            "reason": end.reason,
            "continues": end.continues,
            "cached_tokens": end.cached_tokens,
            "output_tokens": end.output_tokens,
        }
    return row


LOOKUP_TYPES: Final = {
    "epoch": "int",
    "step": "int",
    "now_s": "float",
    "request": "str",
    "job": "str",
    "local_hit_tokens": "int",
    "external_hit_tokens": "int",
    "prompt_tokens": "int",
    "total_tokens": "int",
    "connector": "str",
    "is_async": "bool",
    "result": "str",
}
