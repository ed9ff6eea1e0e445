"""The `longshore` command. Each command imports its modules when it runs, so `--help` is fast."""

import contextlib
import difflib
import io
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Env, Toml

import longshore
from longshore.deploy.bench.options import (
    AgentsOptions,
    FitCostOptions,
    JobsOptions,
    LatencyOptions,
    ServeBenchOptions,
    ThroughputOptions,
)
from longshore.deploy.cli.admin_commands import admin
from longshore.deploy.cli.client_options import (
    BatchOptions,
    CachePlanOptions,
    ChatOptions,
    CompleteOptions,
    DoctorOptions,
    QuantizeOptions,
    RunBatchOptions,
    TopOptions,
)
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.settings.options import ServeOptions
from longshore.deploy.settings.parameters import SHOWN_AS_DEMO_MODEL
from longshore.deploy.settings.vllm_names import translate_flags
from longshore.deploy.simulator.options import SimulateOptions
from longshore.deploy.supervisor.fork_server import VARIABLE_PREFIX
from longshore.deploy.supervisor.log_lines import LINE_FORMATS
from longshore.deploy.supervisor.logs import set_up_logging, writes_json
from longshore.protocol.errors import ConfigError, LongshoreError
from longshore.protocol.model_files import open_regular
from longshore.protocol.process_limits import limit_reached

logger = logging.getLogger(__name__)

app = App(
    name="longshore",
    help="Serve language models.",
    version=longshore.__version__,
    version_flags=("--version", "-v"),
)
_ENVIRONMENT = Env(VARIABLE_PREFIX, command=False)
bench = App(name="bench", help="Measure throughput and latency; print the results as JSON.")
app.command(bench)
kv = App(name="kv", help="Look at, check and remove the KV blocks that the disk tier keeps.")
kv.config = ()  # flags alone: no variable may answer `clean --yes`
app.command(kv)
app.command(admin)
keys = App(
    name="keys", help="Make, rotate, show and remove the keys of KV event subscribers and nodes."
)
keys.config = ()  # flags alone, except for the state directory, which `serve` uses as well
app.command(keys)
trace = App(name="trace", help="Summarize, export and plot traces of --sched-trace.")
trace.config = ()  # flags alone: the files are those of one look
app.command(trace)
_StateDir = Annotated[Path | None, Parameter(env_var=f"{VARIABLE_PREFIX}STATE_DIR")]


@app.command(usage="Usage: longshore serve [OPTIONS] [MODEL ...]")
def serve(
    model: Annotated[tuple[Path, ...], SHOWN_AS_DEMO_MODEL] = (DEMO_MODEL_DIR,),
    *,
    models: Annotated[Path | None, Parameter(group="Model")] = None,
    yes: Annotated[bool, Parameter(group="Model")] = False,
    options: Annotated[ServeOptions, Parameter(name="*")] = ServeOptions(),  # noqa: B008  # frozen
) -> None:
    """Serve models behind an OpenAI-compatible API until SIGTERM, SIGHUP or Ctrl-C.

    Args:
        model: Folder of the model in Hugging Face format, its GGUF file, a name that `longshore
            models` lists, or an id on a model hub (owner/name, owner/name@revision or, for
            a GGUF file, owner/name:Q4_K_M). Of several, the field `model` of a request selects
            one.
        models: TOML file with several models, each with settings of its own (docs/serving.md).
        yes: Fetch a model that `longshore models` lists if it is not on this machine.
    """
    if options.topology is not None:
        from longshore.deploy.cli.node import serve_topology

        if models is not None:
            raise ConfigError("--models and --topology are both given; a topology has one model")
        serve_topology(model, options, announce=_announce)
        return

    from longshore.deploy.cli.serve import serve as serve_models
    from longshore.deploy.model.folder import read_model_folder
    from longshore.deploy.settings.models_file import check_common_settings, read_models_file
    from longshore.deploy.topology.node_plan import whole_deployment

    set_up_logging(options.log_level, LINE_FORMATS[options.log_format])
    if models is None:
        check_common_settings(model, options)
        given = [(each, options) for each in model]
    elif model != (DEMO_MODEL_DIR,):
        raise ConfigError(
            f"MODEL is {model[0]}, and --models {models} has others. Remove one of them."
        )
    else:
        given = read_models_file(models, options)
    if yes:
        from longshore.deploy.cli.models import pull_model

        for name, _ in given:
            pull_model(str(name), options.state_dir)
    plan = whole_deployment(options, [settings for _, settings in given])
    folders = [read_model_folder(name, options.state_dir) for name, _ in given]
    serve_models(folders, plan, announce=_announce)


@app.command
def models(*, state_dir: _StateDir = None) -> None:
    """List models that are known to work, with short names for `pull` and `serve`.

    Args:
        state_dir: State directory, where fetched models are kept.
    """
    from longshore.deploy.cli.models import print_models

    print_models(state_dir)


@app.command
def pull(name: str, *, state_dir: _StateDir = None) -> None:
    """Fetch a model and print its folder or GGUF file.

    Args:
        name: A name that `longshore models` lists, or an id on a model hub (owner/name,
            owner/name@revision or, for a GGUF file, owner/name:Q4_K_M).
        state_dir: State directory, where fetched models are kept.
    """
    from longshore.deploy.cli.models import pull_model

    print(pull_model(name, state_dir))


@app.command
def quantize(
    model: str,
    *,
    options: Annotated[QuantizeOptions, Parameter(name="*")] = QuantizeOptions(),  # noqa: B008  # frozen
) -> None:
    """Write a quantised copy of a model, in the layout of compressed-tensors, and print how well
    both predict a text. Linear layers are quantised; embeddings, output head and routers are not.

    Args:
        model: Folder in Hugging Face format with floats, or id on a model hub.
    """
    from longshore.deploy.cli.quantize import run

    run(model, options)


@app.command
def node(
    *,
    topology: Path,
    name: str,
    check: bool = False,
    api_key: tuple[str, ...] | None = None,
) -> None:
    """Start the engines and gateways that a topology has for one node, until SIGTERM, SIGHUP or
    Ctrl-C. All nodes have the same file.

    Args:
        topology: TOML file that describes all nodes (docs/topology.md). Settings come from it.
        name: Name of this node in the file.
        check: Only check the file and the keys of this node, and print what would be started.
        api_key: API keys that clients may use. Set them in LONGSHORE_API_KEY, because other users
            can see command lines, or use api_key_file in the file.
    """
    from longshore.deploy.cli.node import check_variables, run_node

    check_variables(os.environ)
    run_node(topology, name, only_checks=check, api_key=api_key, announce=_announce)


@app.command
def chat(
    *,
    options: Annotated[ChatOptions, Parameter(name="*")] = ChatOptions(),  # noqa: B008  # frozen
) -> None:
    """Chat with a running server in the terminal; /help lists the commands.

    If standard input is a pipe, every line is a message, only the answers are written to standard
    output, and the exit status is 1 if one failed.
    """
    from longshore.deploy.cli.chat import chat as talk

    sys.exit(0 if talk(options) else 1)


@app.command
def complete(
    *,
    options: Annotated[CompleteOptions, Parameter(name="*")] = CompleteOptions(),  # noqa: B008  # frozen
) -> None:
    """Continue texts with a running server: lines of the terminal or of a pipe.

    Exit status 1: a text was not continued.
    """
    from longshore.deploy.cli.complete import complete as continue_texts

    sys.exit(0 if continue_texts(options) else 1)


@app.command(usage="Usage: longshore batch FILE [OPTIONS]")
def batch(
    file: Path,
    *,
    options: Annotated[BatchOptions, Parameter(name="*")] = BatchOptions(),  # noqa: B008  # frozen
) -> None:
    """Answer the requests of a file with a running server, and go on where a former run has ended.

    Exit status 1: a request was rejected.

    Args:
        file: JSON lines in OpenAI's batch format: custom_id, method, url and body.
    """
    from longshore.deploy.cli.batch import batch as answer_file

    sys.exit(0 if answer_file(file, options) else 1)


@app.command(name="run-batch")
def run_batch(
    *,
    options: Annotated[RunBatchOptions, Parameter(name="*")],
    server: Annotated[ServeOptions, Parameter(name="*")] = ServeOptions(),  # noqa: B008  # frozen
) -> None:
    """Answer the requests of a file with a server that is started for it, as vLLM's run-batch: -i
    requests.jsonl -o answers.jsonl --model MODEL, with the options of `serve`.

    Exit status 1: a request was rejected.
    """
    from longshore.deploy.cli.batch import run_batch as answer_file

    sys.exit(0 if answer_file(options, server) else 1)


@app.command
def top(
    *,
    options: Annotated[TopOptions, Parameter(name="*")] = TopOptions(),  # noqa: B008  # frozen
) -> None:
    """Monitor a running server: queues, KV blocks, rates and latencies."""
    from longshore.deploy.cli.top import top as watch

    watch(options)


@app.command
def doctor(
    *,
    options: Annotated[DoctorOptions, Parameter(name="*")] = DoctorOptions(),  # noqa: B008  # frozen
    plan: Annotated[CachePlanOptions, Parameter(name="*")] = CachePlanOptions(),  # noqa: B008  # frozen
) -> None:
    """Show the state of a running engine and what each waiting request waits for. With --machine,
    check this machine instead; with --bandwidth, measure how fast it moves KV blocks; with --plan,
    show how much a model's KV cache will hold.

    Exit status 0: healthy; 1: the engine is stalled, or the machine has a problem; 2: the engine
    cannot be reached.
    """
    if plan.plan is not None:
        from longshore.deploy.cli.cache_plan import print_plan

        print_plan(plan, as_json=options.json)
        return

    from longshore.deploy.cli.doctor import examine, examine_bandwidth, examine_machine

    if options.bandwidth:
        sys.exit(examine_bandwidth(options))

    sys.exit(examine_machine(options) if options.machine else examine(options))


@app.command
def completion(shell: Literal["bash", "fish", "zsh"]) -> None:
    """Print a script that completes commands and flags, for example: source <(longshore completion
    bash)

    Args:
        shell: The shell that reads the script.
    """
    print(app.generate_completion(shell=shell))


@app.command(name="collect-env")
def collect_env() -> None:
    """Show what a report of a problem needs: versions, devices, processors, memory and limits, as
    `doctor --machine` does."""
    from longshore.deploy.cli.doctor import examine_machine

    examine_machine(DoctorOptions(machine=True))


@app.command
def simulate(
    *,
    options: Annotated[SimulateOptions, Parameter(name="*")] = SimulateOptions(),  # noqa: B008  # frozen
) -> None:
    """Simulate a deployment on a trace, with the real scheduler, tiers and router: latency,
    throughput and hit rates, without a GPU (docs/simulator.md)."""
    from longshore.deploy.cli.simulate import run

    run(options)


@app.command
def replay(
    file: Path,
    *,
    until: int | None = None,
    explain: str | None = None,
    scheduling_policy: str | None = None,
) -> None:
    """Repeat what `serve --record FILE` has recorded on the same scheduler; compare every plan.

    Exit status 0: all plans are equal; 1: one differs.

    Args:
        file: Name of the record, or one of its files.
        until: Number of the last step to repeat.
        explain: Id of a request: show when it waited and why, was admitted, preempted and ended.
        scheduling_policy: Policy of another package, with which the record was made: run its code
            and compare its answers. Otherwise, its recorded answers are used.
    """
    from longshore.deploy.cli.replay import replay as repeat

    sys.exit(repeat(file, until=until, explain=explain, policy=scheduling_policy))


@bench.command
def throughput(
    *,
    options: Annotated[ThroughputOptions, Parameter(name="*")] = ThroughputOptions(),  # noqa: B008  # frozen
) -> None:
    """Measure offline throughput: all prompts at once, through LLM."""
    from longshore.deploy.bench.throughput import run

    run(options)


@bench.command
def latency(
    *,
    options: Annotated[LatencyOptions, Parameter(name="*")] = LatencyOptions(),  # noqa: B008  # frozen
) -> None:
    """Measure offline latency: how long a batch of prompts takes, through LLM."""
    from longshore.deploy.bench.latency import run

    run(options)


@bench.command(name="serve")
def bench_serve(
    *,
    options: Annotated[ServeBenchOptions, Parameter(name="*")] = ServeBenchOptions(),  # noqa: B008  # frozen
) -> None:
    """Measure latency and throughput of a running server at a request rate."""
    from longshore.deploy.bench.serve import run

    run(options)


@bench.command(name="fit-cost")
def bench_fit_cost(
    *,
    options: Annotated[FitCostOptions, Parameter(name="*")] = FitCostOptions(),  # noqa: B008  # frozen
) -> None:
    """Fit a cost model for `longshore simulate` to a running server, which must be idle."""
    from longshore.deploy.bench.fit_cost import run

    run(options)


@bench.command(name="agents")
def bench_agents(
    *,
    options: Annotated[AgentsOptions, Parameter(name="*")] = AgentsOptions(),  # noqa: B008  # frozen
) -> None:
    """Make a workload of agents, from published statistics of coding agents."""
    from longshore.deploy.bench.agents import run

    run(options)


@bench.command(name="jobs")
def bench_jobs(
    *,
    options: Annotated[JobsOptions, Parameter(name="*")] = JobsOptions(),  # noqa: B008  # frozen
) -> None:
    """Measure the completion times of a workload's jobs on a running server."""
    from longshore.deploy.bench.jobs import run

    run(options)


@kv.command(name="ls")
def kv_ls(path: Path, *, json: bool = False) -> None:
    """List the stores of all models in a folder.

    Args:
        path: Folder of the disk tier.
        json: Print JSON instead of a table.
    """
    from longshore.deploy.cli.kv import list_stores

    list_stores(path, as_json=json)


@kv.command(name="stats")
def kv_stats(path: Path, *, store: str | None = None, json: bool = False) -> None:
    """Show the identity of each store, and the blocks and bytes of its ranks.

    Args:
        path: Folder of the disk tier.
        store: Only this store: the beginning of its id, as `ls` prints it.
        json: Print JSON instead of tables.
    """
    from longshore.deploy.cli.kv import show_stores

    show_stores(path, store, as_json=json)


@kv.command(name="verify")
def kv_verify(path: Path, *, store: str | None = None, json: bool = False) -> None:
    """Read all blocks and compare their checksums. Changes nothing, and can run while the stores
    are in use.

    Exit status 0: all blocks are good; 1: something is damaged.

    Args:
        path: Folder of the disk tier.
        store: Only this store: the beginning of its id, as `ls` prints it.
        json: Print JSON instead of text.
    """
    from longshore.deploy.cli.kv import verify

    sys.exit(verify(path, store, as_json=json))


@kv.command(name="clean")
def kv_clean(
    path: Path,
    *,
    model: str | None = None,
    store: str | None = None,
    all: bool = False,
    older_than: str | None = None,
    yes: Annotated[bool, Parameter(group="Model")] = False,
) -> None:
    """Delete stores. Several conditions must all be true. A store that is in use is never deleted.

    Args:
        path: Folder of the disk tier.
        model: Stores of the model with this name.
        store: The store with this id, or beginning of an id, as `ls` prints it.
        all: All stores.
        older_than: Stores without a write for this time, such as 12h or 30d.
        yes: Do not ask.
    """
    from longshore.deploy.cli.kv import clean

    clean(path, model=model, store_id=store, every=all, older_than=older_than, yes=yes)


@keys.command(name="create")
def keys_create(
    name: str,
    *,
    public_key: str | None = None,
    output: Path | None = None,
    state_dir: _StateDir = None,
) -> None:
    """Authorize a subscriber of KV events. The first time, also make the engines' keys, which
    servers use from their next start on; from then on, subscribers need keys.

    Args:
        name: Name of the subscriber.
        public_key: Public key that the subscriber has made. Default: make a pair.
        output: File for the subscriber's keys. Default: NAME.json.
        state_dir: State directory of the server.
    """
    from longshore.deploy.cli.keys import create

    create(name, public_key=public_key, output=output, state_dir=state_dir)


@keys.command(name="rotate")
def keys_rotate(
    name: str | None = None,
    *,
    public_key: str | None = None,
    output: Path | None = None,
    state_dir: _StateDir = None,
) -> None:
    """Authorize a second key of a subscriber; the old one is valid until it is removed. Without a
    name, replace the engines' keys.

    Args:
        name: Name of the subscriber.
        public_key: Public key that the subscriber has made. Default: make a pair.
        output: File for the subscriber's keys. Default: NAME.json.
        state_dir: State directory of the server.
    """
    from longshore.deploy.cli.keys import rotate

    rotate(name, public_key=public_key, output=output, state_dir=state_dir)


@keys.command(name="remove")
def keys_remove(name: str, *, old: bool = False, state_dir: _StateDir = None) -> None:
    """Remove the keys of a subscriber: it cannot connect again.

    Args:
        name: Name of the subscriber.
        old: Keep the key that was added last.
        state_dir: State directory of the server.
    """
    from longshore.deploy.cli.keys import remove

    remove(name, only_old=old, state_dir=state_dir)


@keys.command(name="show")
def keys_show(*, json: bool = False, state_dir: _StateDir = None) -> None:
    """Show the public keys of engines and subscribers.

    Args:
        json: Print JSON instead of a table.
        state_dir: State directory of the server.
    """
    from longshore.deploy.cli.keys import show

    show(as_json=json, state_dir=state_dir)


@keys.command(name="node")
def keys_node(*, output: Path = Path("node.json")) -> None:
    """Make the keys of a node of a topology, and print the public key. Run it on the node.

    Args:
        output: File for the keys.
    """
    from longshore.deploy.topology.keys import create_node_keys

    print(f'public_key = "{create_node_keys(output)}"')


@keys.command(name="transfer")
def keys_transfer(*, output: Path = Path("transfer.key")) -> None:
    """Make the secret that engines on different nodes must know to pull KV from each other. Copy
    the file to all nodes that have engines.

    Args:
        output: File for the secret.
    """
    from longshore.deploy.topology.keys import create_transfer_secret

    create_transfer_secret(output)
    print(f"The secret is in {output}: copy the file to all nodes that have engines.")


@trace.command(name="summary")
def trace_summary(file: Path, *, json: bool = False) -> None:
    """Show what a scheduler trace has: steps, tokens, occupancy, hits, and times of requests.

    Args:
        file: The trace.
        json: Print JSON instead of tables.
    """
    from longshore.deploy.cli.trace import summary

    summary(file, as_json=json)


@trace.command(name="export")
def trace_export(file: Path, *, perfetto: Path | None = None, parquet: Path | None = None) -> None:
    """Convert a scheduler trace for other tools. Existing files are replaced.

    Args:
        file: The trace.
        perfetto: File for Chrome trace events, which ui.perfetto.dev opens.
        parquet: Folder for the tables steps, requests and lookups in the Parquet format.
    """
    from longshore.deploy.cli.trace import export

    export(file, perfetto=perfetto, parquet=parquet)


@trace.command(name="plot")
def trace_plot(file: Path, *, out: Path) -> None:
    """Plot a scheduler trace: occupancy, queues, tokens per step, hits and queueing times.

    Args:
        file: The trace.
        out: Folder for the PNG files. Existing files are replaced.
    """
    from longshore.deploy.cli.trace import plot

    plot(file, out=out)


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Path | None = None,
) -> None:
    """A setting is taken from its flag, else its environment variable (LONGSHORE_NUM_BLOCKS for
    --num-blocks), else the command's table in the TOML file ([serve], [bench.serve]), else its
    default.

    Args:
        config: TOML file with settings. Default: none.
    """
    if tokens[:1] == ("help",):
        tokens = (*tokens[1:], "--help")
    if tokens[:1] == ("serve",) and _wants_json(tokens):
        set_up_logging("info", LINE_FORMATS["json"])  # the settings may have errors
    _check_variables(os.environ)
    app.config = (_ENVIRONMENT,) if config is None else (_ENVIRONMENT, _settings_file(config))
    words = translate_flags(tokens) if tokens[:1] == ("serve",) else tokens
    app(words, exit_on_error=False, print_error=False)


def _wants_json(tokens: Sequence[str]) -> bool:
    """Whether the flags, or else the variable, ask for a log in JSON."""
    flags = " ".join(tokens).replace("--log-format ", "--log-format=").replace("_", "-").split(" ")
    given = [flag.partition("=")[2] for flag in flags if flag.startswith("--log-format=")]
    return [os.environ.get(f"{VARIABLE_PREFIX}LOG_FORMAT"), *given][-1] == "json"


def _check_variables(variables: Mapping[str, str]) -> None:
    """Raise ConfigError for an empty variable, because a deployment that failed to fill in its API
    key must not serve without keys, and for `LONGSHORE_NO_...`, which would be ignored. Warn about
    variables that no command reads."""
    ours = sorted(name for name in variables if name.startswith(VARIABLE_PREFIX))
    for name in ours:
        if name.startswith(VARIABLE_PREFIX + "NO_"):
            setting = name.removeprefix(VARIABLE_PREFIX + "NO_")
            raise ConfigError(
                f"{name} is not a variable; use {VARIABLE_PREFIX}{setting}=false instead"
            )
        if not variables[name].strip():
            raise ConfigError(f"{name} is set but empty; give it a value or unset it")
    known = _known_variables() if ours else set()  # takes 0.1 s
    unknown = [
        f"{name} (did you mean {nearest[0]}?)" if nearest else name
        for name in ours
        if name not in known
        for nearest in [difflib.get_close_matches(name, known, n=1, cutoff=0.8)]
    ]
    if unknown:
        if writes_json():
            logger.warning("unknown variables: %s", ", ".join(unknown))
        else:
            print(f"longshore: warning: unknown variables: {', '.join(unknown)}", file=sys.stderr)


def _known_variables() -> set[str]:
    """The variables of all commands: one may be meant for another command than this."""
    commands = [
        *(app[name] for name in _commands(app)),
        *(bench[name] for name in _commands(bench)),
    ]
    return {
        VARIABLE_PREFIX + name.removeprefix("--").replace("-", "_").upper()
        for command in commands
        if command.default_command is not None
        for argument in command.assemble_argument_collection()
        if not argument.children
        for name in argument.names
    }


def _settings_file(path: Path) -> Toml:
    """Raises ConfigError for a table that belongs to no command and for `no-` keys."""
    settings = Toml(path, must_exist=True)
    try:
        open_regular(path).close()  # reading a pipe would wait for a writer
        tables = settings.config
    except (OSError, CycloptsError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    commands = [*_commands(app), *(f"bench.{name}" for name in _commands(bench))]
    for name in (
        "bench",
        "kv",
        "keys",
        "admin",
        "trace",
    ):  # all but the first take no settings from files
        commands.remove(name)
    nested = tables.pop("bench", {})
    named = {**tables, **({f"bench.{n}": t for n, t in nested.items()} if nested else {})}
    for name, table in named.items():
        if name not in commands or not isinstance(table, dict):
            raise ConfigError(
                f"--config {path}: {name} is not a command's table; put settings under one of "
                f"{', '.join(f'[{command}]' for command in commands)}"
            )
        for key in table:
            if key.startswith(("no-", "no_")):
                raise ConfigError(f"--config {path}: use {key[3:]} = false instead of {key}")
    if nested:
        tables["bench"] = nested
    return settings


def _commands(of: App) -> list[str]:
    return [name for name in of if not name.startswith("-")]


def main() -> None:
    """The console script. Exit status 1: it failed while running; 2: a setting is invalid."""
    # A daemon may be started with its outputs closed: discard what it writes.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # open until the exit
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # whatever PYTHONIOENCODING says, writing never fails
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app.meta(sys.argv[1:], exit_on_error=False, print_error=False)
    except LongshoreError as error:
        _report_error(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except CycloptsError as error:  # a wrong command line, setting or variable
        print(f"longshore: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if (reason := limit_reached(error)) is None:
            raise
        _report_error(reason)
        sys.exit(1)


def _report_error(reason: str) -> None:
    if writes_json():
        logger.error("%s", reason)
    else:
        print(f"longshore: error: {reason}", file=sys.stderr)


def _announce(line: str) -> None:
    if writes_json():
        logger.info("%s", line)
        return
    with contextlib.suppress(OSError):  # the server runs even if standard output is broken
        print(f"longshore: {line}", flush=True)
