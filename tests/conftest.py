"""What all tests share: the mark `req`, whose ids must exist in docs/requirements.md, and the
option --req, the option --long and the mark of this name, a state directory, and the order in which
several processes start the test files."""

import gc
import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, Phase, settings

# The same examples in every run, and no time limits, because the machine may be slow.
settings.register_profile(
    "longshore",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(  # for scripts/mutate, which asks only whether a test fails
    "unshrunk",
    settings.get_profile("longshore"),
    phases=[phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)],
)
settings.load_profile("longshore")

ROOT = Path(__file__).resolve().parent.parent
TESTS = Path(__file__).resolve().parent

# Seconds that the longest files took, written by --write-durations. They start first, so that none
# of them is left to one process at the end.
DURATIONS = TESTS / "durations.json"
MIN_DURATION_S = 3.0


# A shell starts background commands with SIGINT ignored; tests send SIGINT to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """No test uses the state directory of the user, nor do the processes that it starts. Without a
    GPU, Triton kernels run in its interpreter."""
    if not Path("/dev/nvidiactl").exists():
        os.environ["TRITON_INTERPRET"] = "1"
    # Two threads that divide a small operation wait for each other where other tests run, too.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not hasattr(config, "workerinput"):  # the processes that run the files inherit it
        state_home = tempfile.mkdtemp(prefix="state-of-tests-")
        os.environ["XDG_STATE_HOME"] = state_home
        config.add_cleanup(lambda: shutil.rmtree(state_home, ignore_errors=True))
        config.pluginmanager.register(Failures(config))
        if config.getoption("--write-durations"):
            config.pluginmanager.register(Durations())
    gc.disable()  # until all modules are imported: what is loaded stays
    config.add_cleanup(gc.unfreeze)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="also run the tests marked long, and others with more seeds: more than an hour",
    )
    parser.addoption(
        "--write-durations",
        action="store_true",
        help="after a run of all tests, write tests/durations.json, which orders the test files",
    )
    parser.addoption("--req", metavar="ID", help="only tests marked with this id of a requirement")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Files created at collection contain the time, and processes that share tests must have the
    same ids."""
    return argname if isinstance(val, bytes | bytearray) and len(val) > 40 else None


@pytest.fixture(scope="module", autouse=True)
def _own_environment() -> Iterator[None]:
    """What a file's tests set lasts no longer than it: libraries (UCX, Mooncake) are configured by
    variables, which the processes that the next file starts would inherit."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def long_run(pytestconfig: pytest.Config) -> bool:
    """Whether --long was given: a random test then runs all its seeds."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its path is short, unlike that of pytest's own fixture, because a socket below it may have a
    path of 107 bytes."""
    return tmp_path_factory.mktemp("t")


class Failures:
    """Names a test when it fails: a run of all tests may be stopped before it ends."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)  # after the letter that shows it
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.get_terminal_writer()
            terminal.line(
                f"\nfailed: {report.nodeid} ({report.when}): {report.longreprtext[-300:]}"
            )


class Durations:
    """Adds up how long the tests of each file take, and writes it down at the end."""

    def __init__(self) -> None:
        self._by_file: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = (ROOT / report.nodeid.partition("::")[0]).relative_to(TESTS)
        self._by_file[str(file)] += report.duration

    def pytest_sessionfinish(self) -> None:
        longest = {
            file: round(seconds)
            for file, seconds in self._by_file.most_common()
            if seconds >= MIN_DURATION_S
        }
        DURATIONS.write_text(json.dumps(longest, indent=1) + "\n")


def load_script(name: str) -> ModuleType:
    """Import the Python program `scripts/<name>`, which has no .py suffix, under that name."""
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.hookimpl(tryfirst=True)  # before -m and -k deselect tests with a wrong id
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # this is one of the processes that run the files
        durations = json.loads(DURATIONS.read_text())
        items.sort(key=lambda item: -durations.get(str(item.path.relative_to(TESTS)), 0.0))
    requirements = load_script("requirements")
    known = requirements.read_requirements()
    unknown: set[str] = set()
    for item in items:
        for mark in item.iter_markers("req"):
            for id_ in requirements.unknown_ids(mark.args, known):
                unknown.add(f"{item.nodeid} claims {id_}")
    if unknown:
        listed = "\n".join(sorted(unknown))
        raise pytest.UsageError(f"not an id of docs/requirements.md:\n{listed}")
    if (id_ := config.getoption("--req")) is not None:
        keep(config, items, lambda item: any(id_ in m.args for m in item.iter_markers("req")))
    if not config.getoption("--long"):
        keep(config, items, lambda item: item.get_closest_marker("long") is None)


def keep(
    config: pytest.Config, items: list[pytest.Item], is_wanted: Callable[[pytest.Item], bool]
) -> None:
    """Deselect all other tests."""
    config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
    items[:] = filter(is_wanted, items)
