"""`longshore doctor`: shows the state of an engine and its waiting requests, with a verdict."""

import asyncio
import contextlib
import enum
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longshore.connectors.options import parse_size
from longshore.deploy.bench.error_message import error_message
from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.deploy.cli.client_options import DoctorOptions
from longshore.deploy.gateway.api.uncached_clients import UncachedClient, UncachedClientList
from longshore.deploy.machine.finding import summary, table
from longshore.deploy.machine.report import findings
from longshore.protocol.statistics import EngineReport
from longshore.scheduler.step.planner import PauseState

REPORT_PATH: Final = "/engine/report"
CLIENTS_PATH: Final = "/engine/uncached-clients"
MAX_SHOWN: Final = 10
MAX_ID_LEN: Final = 16
"""Characters shown of a request id: its end, since a client may have chosen its beginning."""


class Health(enum.IntEnum):
    """The verdict as an exit status."""

    HEALTHY = 0
    STALLED = 1
    UNREACHABLE = 2


class Verdict(msgspec.Struct, frozen=True):
    """state: idle, serving, paused, stalled or unreachable. what: the details. advice: what to do,
    if anything."""

    health: Health
    state: str
    what: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.what}" + (f" {self.advice}" if self.advice else "")


def examine(options: DoctorOptions) -> Health:
    """Ask the server, judge its report and print both; returns the exit status."""
    answer = asyncio.run(_ask(options, REPORT_PATH))
    reports = _read(answer)
    uncached = _read_uncached(asyncio.run(_ask(options, CLIENTS_PATH))) if reports else []
    verdict = judge_all(reports, options.stall_after_s) if reports else judge_silence(answer)
    if options.json:
        shown = [msgspec.structs.asdict(report) for report in reports]
        content = {
            "state": verdict.state,
            "verdict": str(verdict),
            "report": shown if len(shown) > 1 else next(iter(shown), None),
            "uncached_clients": uncached,
        }
        print(msgspec.json.format(msgspec.json.encode(content)).decode())
    else:
        console = Console(soft_wrap=True, highlight=False)
        for report in reports:
            for table in tables(report):
                console.print(table)
        for client in uncached:
            console.print(_on_uncached(client), markup=False)
        console.print(str(verdict), markup=False)
    return verdict.health


def _read(answer: HttpAnswer | Exception) -> list[EngineReport]:
    """The reports of all engines; empty if the answer holds none."""
    if isinstance(answer, HttpAnswer) and answer.status == 200:
        with contextlib.suppress(msgspec.MsgspecError):
            content = msgspec.json.decode(answer.body, type=EngineReport | list[EngineReport])
            return content if isinstance(content, list) else [content]
    return []


def _read_uncached(answer: HttpAnswer | Exception) -> list[UncachedClient]:
    """Empty if the server does not say."""
    if isinstance(answer, HttpAnswer) and answer.status == 200:
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(answer.body, type=UncachedClientList).data
    return []


def _on_uncached(client: UncachedClient) -> str:
    key = "" if client.key is None else f" with the key {client.key}"
    return (
        f"The last {client.num_prompts} long prompts of the client {client.user_agent}{key} differ "
        f"from token {client.first_difference} on, so nothing of them is cached. If it puts the "
        "time or a random value there, set --prompt-nonces."
    )


def examine_machine(options: DoctorOptions) -> int:
    """Check the machine and print the findings; returns the exit status: 1 for a problem."""
    found = findings(HttpEndpoint(options.url).port)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        console = Console(highlight=False)
        console.print(table(found))
        console.print(summary(found))
    return int(any(finding.state == "problem" for finding in found))


def examine_bandwidth(options: DoctorOptions) -> int:
    """Measure how fast blocks move and print that. Raises ConfigError for an unusable path."""
    from longshore.deploy.machine.bandwidth import bandwidth_table, measure_bandwidth

    block_bytes = parse_size("block_bytes", options.block_bytes)
    found = measure_bandwidth(block_bytes, options.block_tokens, options.path)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        Console(highlight=False).print(bandwidth_table(found))
    return 0


async def _ask(options: DoctorOptions, path: str) -> HttpAnswer | Exception:
    """The server's answer, or why there is none."""
    endpoint = HttpEndpoint(options.url, api_key=options.api_key)
    try:
        return await endpoint.request("GET", path, timeout_s=options.timeout_s)
    except (OSError, TimeoutError) as error:
        return error


def judge_all(reports: Sequence[EngineReport], stall_after_s: float) -> Verdict:
    """The worst of the engines' verdicts, with the details of all."""
    verdicts = [judge(report, stall_after_s) for report in reports]
    if len(verdicts) == 1:
        return verdicts[0]
    worst = max(verdicts, key=lambda verdict: (verdict.health, verdict.state != "idle"))
    each = " ".join(
        f"{report.engine_id} is {verdict.state}: {verdict.what}"
        for report, verdict in zip(reports, verdicts, strict=True)
    )
    return Verdict(worst.health, worst.state, each, worst.advice)


def judge(report: EngineReport, stall_after_s: float) -> Verdict:
    """The verdict on an engine that answered."""
    requests = f"{report.num_running} running, {report.num_waiting} waiting"
    idle = f"no request has advanced for {report.idle_s:.1f} s"
    if not report.num_running and not report.num_waiting:
        return Verdict(Health.HEALTHY, "idle", "no requests.")
    if report.pause != PauseState.UNPAUSED.value and not report.steps_in_flight:
        return Verdict(
            Health.HEALTHY, "paused", f"{requests}; the engine is {_pause(report)}.", "Resume it."
        )
    if report.idle_s < stall_after_s:
        return Verdict(Health.HEALTHY, "serving", f"{requests}.")
    if report.steps_in_flight:
        steps = f"{report.steps_in_flight} planned step{'s' * (report.steps_in_flight > 1)}"
        return Verdict(
            Health.STALLED,
            "stalled",
            f"{requests}, and {idle}: the worker has not answered {steps}.",
            "If its process is stopped or hangs, restart the deployment. If steps are just too "
            "long, lower --max-num-batched-tokens.",
        )
    reasons = Counter(waiting.waits_for for waiting in report.waiting).most_common(1)
    most = f" The most frequent reason for waiting: {reasons[0][0]}." if reasons else ""
    return Verdict(
        Health.STALLED,
        "stalled",
        f"{requests}, and {idle}, although the worker is free.{most}",
        "The table shows what each request waits for. If it can never get that, abort it by "
        "disconnecting its client; if it waits for blocks, raise --num-blocks.",
    )


def judge_silence(answer: HttpAnswer | Exception) -> Verdict:
    """The verdict on a server that returned no report."""
    if isinstance(answer, Exception):
        reason = str(answer) or type(answer).__name__
        return Verdict(
            Health.UNREACHABLE, "unreachable", f"{reason}.", "Is `longshore serve` running there?"
        )
    message = error_message(answer) or "not a Longshore gateway of the same version"
    if answer.status == 504:
        return Verdict(
            Health.STALLED,
            "stalled",
            f"{message}.",
            "Check the scheduler process and its last log lines, then restart the deployment.",
        )
    return Verdict(Health.UNREACHABLE, "unreachable", f"HTTP {answer.status}: {message}.")


def _pause(report: EngineReport) -> str:
    return {
        PauseState.PAUSED_NEW.value: "paused for new requests",
        PauseState.PAUSED_ALL.value: "paused",
    }.get(report.pause, report.pause)


def tables(report: EngineReport) -> list[Table]:
    """A table of the engine's state, and one with a row per waiting request."""
    state = Table(title=Text(f"Engine {report.engine_id}"), show_header=False, title_justify="left")
    used = report.num_blocks - 1 - report.num_free_blocks
    for name, value in (
        ("requests", f"{report.num_running} running, {report.num_waiting} waiting"),
        ("blocks", f"{used:,} of {report.num_blocks - 1:,} in use ({report.kv_usage:.0%})"),
        ("steps in flight", f"{report.steps_in_flight}"),
        ("without progress", f"for {report.idle_s:.1f} s"),
        ("pause", _pause(report)),
    ):
        state.add_row(name, Text(value))
    if report.num_pins:
        pinned = f"{report.num_pinned_blocks:,} blocks of {report.num_pins:,} jobs"
        state.add_row("pinned for next turns", Text(pinned))
    if not report.waiting:
        return [state]
    shown = report.waiting[:MAX_SHOWN]
    waiting = Table(title="Waiting requests, in scheduling order", title_justify="left")
    waiting.add_column("request", no_wrap=True)
    for column in ("waits for", "since", "tokens", "preempted"):
        waiting.add_column(column, overflow="fold")
    for each in shown:
        waiting.add_row(
            Text(_short(each.request_id)),
            Text(each.waits_for),
            f"{each.waited_s:.1f} s",
            f"{each.num_tokens:,}",
            f"{each.num_preemptions}×",
        )
    if report.num_waiting > len(shown):
        rest = report.num_waiting - len(shown)
        in_json = "all" if len(report.waiting) == report.num_waiting else f"{len(report.waiting):,}"
        waiting.caption = f"and {rest:,} more (--json has {in_json})"
    return [state, waiting]


def _short(request_id: str) -> str:
    return request_id if len(request_id) <= MAX_ID_LEN + 1 else f"…{request_id[-MAX_ID_LEN:]}"
