"""`longshore trace`: summarizes, exports and plots a scheduler trace."""

from pathlib import Path

from longshore.deploy.trace.reading import Trace, read_trace
from longshore.protocol.errors import ConfigError


def summary(file: Path, *, as_json: bool) -> None:
    """`longshore trace summary`"""
    from longshore.deploy.trace.summary import print_json, print_summary, summarize

    figures = summarize(read_trace(file))
    if as_json:
        print_json(figures)
    else:
        print_summary(figures)


def export(file: Path, *, perfetto: Path | None, parquet: Path | None) -> None:
    """`longshore trace export`"""
    if perfetto is None and parquet is None:
        raise ConfigError("nothing to export: give --perfetto OUT, --parquet OUT, or both")
    trace = read_trace(file)
    if perfetto is not None:
        from longshore.deploy.trace.perfetto import export_perfetto

        try:
            num_events = export_perfetto(trace, perfetto)
        except OSError as error:
            reason = f"perfetto={perfetto} cannot be written: {error.strerror}"
            raise ConfigError(reason) from error
        print(f"{perfetto}: {num_events:,} events; open it at https://ui.perfetto.dev")
    if parquet is not None:
        from longshore.deploy.trace.tables import export_parquet

        for name, num_rows in export_parquet(trace, parquet).items():
            print(f"{parquet / name}.parquet: {num_rows:,} rows")
    _print_gaps(trace)


def plot(file: Path, *, out: Path) -> None:
    """`longshore trace plot`"""
    from longshore.deploy.trace.plots import plot_trace

    trace = read_trace(file)
    if not trace.steps and not trace.requests:
        raise ConfigError(f"{file} has no steps and no requests, so there is nothing to plot")
    for path in plot_trace(trace, out):
        print(path)
    _print_gaps(trace)


def _print_gaps(trace: Trace) -> None:
    if trace.num_dropped:
        print(f"{trace.num_dropped:,} records are missing: the disk was too slow")
    if trace.num_truncated:
        print("the last line is not whole and was left out: the process was killed")
