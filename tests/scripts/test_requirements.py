"""scripts/requirements, and the check of requirement marks when pytest collects."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LIST = """\
# Title

## A. First part (ONE)

- **ONE-01** The first thing holds. [S0]
- **ONE-02** The second thing holds. [S0]

## B. Second part (TWO)

- **TWO-01** Another thing holds. [S1]
"""

TESTS = """\
import pytest

@pytest.mark.req("ONE-01", "TWO-01")
def test_two_things():
    pass

class TestGroup:
    @pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.req("ONE-01"))])
    def test_one_case(self, x):
        pass
"""

FAKE = "from tests.harness import driver"
ENGINE = "import tests.integration.engine_process"
REAL = "from longshore import LLM"
SERVED = "from tests.integration.deployment import Deployment"

UNKNOWN = """
@pytest.mark.req("ONE-99")
def test_unknown():
    pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small tree with the real script and conftest and a list of three requirements."""
    for folder in ("scripts", "tests", "docs"):
        (tmp_path / folder).mkdir()
    for name in ("scripts/requirements", "tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs" / "requirements.md").write_text(LIST)
    (tmp_path / "tests" / "test_things.py").write_text(TESTS)
    return tmp_path


def run(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=project, capture_output=True, text=True, timeout=60
    )


def report(project: Path, *arguments: str) -> dict[str, dict[str, object]]:
    listed = run(project, "scripts/requirements", "--json", *arguments)
    assert listed.returncode == 0, listed.stderr
    return json.loads(listed.stdout)


@pytest.fixture(scope="module")
def real_report() -> dict[str, dict[str, object]]:
    return report(ROOT)


def test_marks_are_listed_with_the_tests_that_carry_them(project: Path) -> None:
    things = "tests/test_things.py"
    assert {id_: entry["tests"] for id_, entry in report(project).items()} == {
        "ONE-01": [f"{things}::test_two_things", f"{things}::TestGroup::test_one_case"],
        "ONE-02": [],
        "TWO-01": [f"{things}::test_two_things"],
    }


def test_proof_selects_by_how_it_is_proven(project: Path) -> None:
    assert list(report(project, "--proof", "missing")) == ["ONE-02"]
    assert list(report(project, "--proof", "component")) == ["ONE-01", "TWO-01"]
    assert list(report(project, "--proof", "fake-worker")) == []


@pytest.mark.parametrize(
    ("files", "proof"),
    [
        ({"test_rule": ""}, "component"),
        ({"test_rule": FAKE}, "fake-worker"),
        ({"test_rule": FAKE, "test_other": ""}, "fake-worker"),
        ({"test_rule": FAKE, "test_model": REAL}, "component"),
        ({"test_rule": f"{FAKE}\n{REAL}"}, "component"),
        ({"test_rule": "import longshore.workers"}, "component"),
        ({"clients/test_client": ""}, "end-to-end"),
        ({"test_rule": FAKE, "chaos/test_faults": ""}, "end-to-end"),
        ({"integration/test_engine": ENGINE}, "fake-worker"),
        ({"integration/test_engine": f"{ENGINE}\n{SERVED}"}, "end-to-end"),
    ],
)
def test_how_an_id_is_proven_depends_on_the_workers_of_its_tests(
    project: Path, files: dict[str, str], proof: str
) -> None:
    helpers = {"harness/driver": "from tests.harness.worker import W", "harness/worker": ""}
    mark = "\nimport pytest\n@pytest.mark.req('ONE-02')\ndef test(): ...\n"
    tests = {name: text + mark for name, text in files.items()}
    for name, text in (helpers | tests).items():
        path = project / "tests" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert report(project)["ONE-02"]["proof"] == proof


def test_section_selects_by_prefix(project: Path) -> None:
    assert list(report(project, "--section", "TWO")) == ["TWO-01"]
    unknown = run(project, "scripts/requirements", "--section", "THREE")
    assert unknown.returncode == 2
    assert "no section THREE; there are ONE, TWO" in unknown.stderr


def test_text_report_groups_by_section_and_counts(project: Path) -> None:
    text = run(project, "scripts/requirements").stdout
    assert text.index("First part (ONE)") < text.index("ONE-02") < text.index("Second part (TWO)")
    assert text.endswith("0 end-to-end, 0 fake-worker, 2 component, 1 missing\n")


def test_unknown_id_is_an_error_of_the_report(project: Path) -> None:
    (project / "tests" / "test_unknown.py").write_text("import pytest\n" + UNKNOWN)
    listed = run(project, "scripts/requirements")
    assert listed.returncode == 2
    assert "ONE-99: tests/test_unknown.py::test_unknown" in listed.stderr


def test_computed_id_is_an_error_of_the_report(project: Path) -> None:
    (project / "tests" / "test_computed.py").write_text(
        "import pytest\n@pytest.mark.req(X)\ndef f(): ...\n"
    )
    listed = run(project, "scripts/requirements")
    assert listed.returncode == 2
    assert "takes literal ids" in listed.stderr


def test_unknown_id_stops_the_collection_of_tests(project: Path) -> None:
    assert run(project, "-m", "pytest", "-q").returncode == 0
    (project / "tests" / "test_unknown.py").write_text("import pytest\n" + UNKNOWN)
    collected = run(project, "-m", "pytest", "-q", "-k", "two_things")
    assert collected.returncode == pytest.ExitCode.USAGE_ERROR
    assert "tests/test_unknown.py::test_unknown claims ONE-99" in collected.stderr


def test_every_id_of_the_real_list_is_read(real_report: dict[str, dict[str, object]]) -> None:
    text = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
    assert len(real_report) == text.count("\n- **")
    assert real_report["POO-03"]["section"] == "Block pool (POO)"


def test_features_with_nothing_but_a_fake_worker_are_those_that_the_readme_lists(
    real_report: dict[str, dict[str, object]],
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^Does not work end to end: (.*?)^Not supported", text, re.M | re.S)
    ids = set(re.findall(r"[A-Z]{3}-\d\d", listed))
    proven_with_a_fake = {
        id_ for id_, entry in real_report.items() if entry["proof"] == "fake-worker"
    }
    assert ids <= proven_with_a_fake, "it works now: README need not list it"
    assert {id_ for id_ in proven_with_a_fake if id_.startswith("FEA")} <= ids
