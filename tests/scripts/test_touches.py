"""scripts/touches: what it counts, in a small tree."""

from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import ROOT, load_script

touches = load_script("touches")

FILES = {
    "protocol/requests.py": '''
        """A docstring that names no_store."""

        class AddRequest:
            request_id: str
            sampling: SamplingParams
            job_id: str | None = None
            no_store: bool = False
        ''',
    "protocol/sampling.py": """
        class SamplingParams:
            top_k: int = 0
        """,
    "scheduler/config.py": """
        class SchedulerConfig:
            max_pin_s: float = 60.0
            endpoint: str
        """,
    "scheduler/features/pins.py": """
        class Pins:
            def begin(self, pins):
                if self.pins is not None:
                    return self.pins
        """,
    "scheduler/features/swap/swaps.py": "class Swaps: ...",
    "scheduler/features/swap/cost.py": "swaps = 1",
    "scheduler/part.py": """
        class Part:
            pins: Pins | None
            swaps: Swaps
            other: int
        """,
    "scheduler/step/planner.py": """
        class Planner:
            def plan(self, given: Pins | None, is_given: bool):
                pins, step = self._pins, self.step
                if pins is None or (given is not None and step is not None):
                    return len(self.swaps.queue) if self.swaps else bool(self.swaps.queue)
                while step in self.swaps.queue or not len(pins):
                    assert is_given and isinstance(self.swaps, NoSwaps)
                return [each for each in step if given]
        """,
    "scheduler/process/loop.py": "loop = Loop(pins=None, text='--max-pin-s=0 is less, no job_id')",
    "deploy/settings/options.py": """
        class EngineOptions:
            max_pin_s: float = 60.0
            port: int = 8000
        """,
    "deploy/gateway/jobs.py": """
        # no_store is in a comment
        def job(request, _top_k):
            return request["job_id"], "no sampling, no top_k", f"{request.no_store=}"
        """,
    "deploy/__init__.py": "\n\n\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return tmp_path


def files_of(tree: Path, name: str) -> list[str]:
    lines = touches.report(tree, names=[name]).splitlines()
    return [line.strip() for line in lines[1:] if "presence test" not in line]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("job_id", ["scheduler/process/loop.py", "protocol/requests.py", "deploy/gateway/jobs.py"]),
        ("no_store", ["protocol/requests.py", "deploy/gateway/jobs.py"]),
        ("top_k", ["protocol/sampling.py", "deploy/gateway/jobs.py"]),
        (
            "max_pin_s",
            ["scheduler/config.py", "scheduler/process/loop.py", "deploy/settings/options.py"],
        ),
        ("pins", ["scheduler/part.py", "scheduler/process/loop.py", "scheduler/step/planner.py"]),
        ("swaps", ["scheduler/part.py", "scheduler/step/planner.py"]),  # its folder is its own
    ],
)
def test_identifiers_arguments_and_strings_count_but_comments_and_docstrings_do_not(
    tree: Path, name: str, files: list[str]
) -> None:
    assert files_of(tree, name) == files


@pytest.mark.parametrize("name", ["request_id", "sampling", "endpoint", "port", "other"])
def test_what_is_no_option_setting_or_feature_is_not_counted(
    tree: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert touches.main(["--files", name], tree) == 2
    assert f"{name} is no option, setting or feature" in capsys.readouterr().err


def test_presence_tests_are_found_in_every_form_but_not_in_the_feature_itself(tree: Path) -> None:
    modules = touches.read_modules(tree)
    tests = touches.presence_tests(modules, touches.find_features(modules))
    assert {test.path for test in tests} == {"scheduler/step/planner.py"}
    assert [(test.line - 3, test.kind, test.feature) for test in tests] == [
        (2, "identity", "pins"),
        (2, "identity", "pins"),
        (3, "truth", "swaps"),
        (3, "state", "swaps"),
        (4, "state", "swaps"),
        (4, "truth", "pins"),
        (5, "identity", "swaps"),
        (6, "truth", "pins"),
    ]


def test_the_tables_have_the_worst_first_and_how_many_are_above_their_targets(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert touches.main([], tree) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line]
    assert rows[1:4] == [
        ["job_id", "3", "1", "12"],
        ["no_store", "2", "1", "6"],
        ["top_k", "2", "1", "6"],
    ]
    assert "\n0 of 3 above the target; the median is 2 files\n" in printed
    assert ["max_pin_s", "3", "2", "2"] in rows
    assert "\n1 of 1 above the target; the median is 3 files\n" in printed
    assert ["scheduler/step/planner.py", "3", "3", "2", "8", "0"] in rows
    assert ["deploy/", "8", "39,000"] in rows  # without __init__.py


def test_a_struct_of_all_options_replaces_the_request(tree: Path) -> None:
    (tree / "protocol" / "options.py").write_text("class RequestOptions:\n    priority: int = 0\n")
    assert touches.option_names(touches.read_modules(tree)) == {"priority", "top_k"}


def test_a_field_with_its_own_flag_is_a_setting(tree: Path) -> None:
    (tree / "worker").mkdir()
    text = 'class LoadConfig:\n    threads: Annotated[int, Setting(env="THREADS")] = 1\n'
    (tree / "worker" / "config.py").write_text(text)
    assert touches.setting_names(touches.read_modules(tree)) == {"max_pin_s", "threads"}


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        ("protocol/sampling.py", "protocol/ has no struct SamplingParams"),
        ("deploy/settings/options.py", "no config has a field that users can set"),
        ("scheduler/part.py", "holds a feature"),
    ],
)
def test_code_without_what_is_counted_is_an_error(
    tree: Path, missing: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / missing).unlink()
    if missing == "scheduler/part.py":
        (tree / "scheduler" / "step" / "planner.py").unlink()
    assert touches.main([], tree) == 2
    assert problem in capsys.readouterr().err


def test_the_real_tree_has_options_settings_and_features() -> None:
    modules = touches.read_modules(ROOT)
    assert touches.option_names(modules) >= {"job_id", "no_store", "top_k", "kv_transfer_params"}
    assert touches.setting_names(modules) >= {"max_pin_s", "load_timeout_s", "max_audio_s"}
    features = touches.find_features(modules).own
    assert features.keys() >= {"forks", "transfers", "encoder", "grammars", "pins", "shares"}
