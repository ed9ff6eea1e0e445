"""scripts/mutate: its list fits the source, and a mutation is made in a copy only."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import ROOT, load_script

mutate = load_script("mutate")

FILE = "connectors/offloading/ledger.py"
LINE = "return size_bytes // block_bytes"


def listed(folder: Path, *tables: dict[str, str]) -> list[str]:
    """Arguments for a list of these mutations, by default of the size of a tier."""
    path = folder / "mutations.toml"
    defaults = {"id": "OFF-11", "file": FILE, "rule": "a rule"}
    path.write_text(
        "".join(
            "[[mutation]]\n"
            + "".join(f"{key} = '''{value}'''\n" for key, value in (defaults | table).items())
            for table in tables
        )
    )
    return ["--mutations", str(path)]


@pytest.mark.slow
def test_every_mutation_applies_to_the_source_and_some_test_claims_its_requirement() -> None:
    mutations = mutate.read_mutations()
    mutate.check(mutations, mutate.files_of_marks())
    assert len({(each.file, each.old, each.new) for each in mutations}) == len(mutations)


def test_every_survivor_is_explained_in_the_docs() -> None:
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    for mutation in mutate.read_mutations():
        if mutation.survives is not None:
            assert f"{mutation.rule} ({mutation.id})" in text
            assert mutation.survives in text


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"old": "no such text", "new": ""}, "`old` 0 times instead of once"),
        ({"old": "return", "new": ""}, "times instead of once"),
        ({"old": LINE, "new": "if (", "file": "gone.py"}, "`old` 0 times instead of once"),
        ({"old": LINE, "new": "if ("}, "is no Python"),
        ({"old": LINE, "new": f"{LINE}  # more"}, "is the same program"),
        ({"old": LINE, "new": "", "id": "OFF-99"}, "no test is marked with OFF-99"),
        ({"old": LINE}, "cannot be read"),
    ],
)
def test_a_list_that_does_not_fit_is_an_error(
    table: dict[str, str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mutate.main(listed(tmp_path, table)) == 2
    assert problem in capsys.readouterr().err


def test_a_run_fails_unless_every_mutation_is_killed_or_explained() -> None:
    plain = mutate.Mutation("OFF-11", FILE, "a rule", LINE, "")
    explained = replace(plain, survives="why")
    good = [mutate.Result(plain, "killed"), mutate.Result(explained, "explained")]
    assert mutate.failures(good) == []
    bad = [
        mutate.Result(plain, "survived"),
        mutate.Result(plain, "unknown"),
        mutate.Result(explained, "killed"),
    ]
    assert len(mutate.failures([*good, *bad])) == 3


@pytest.mark.slow
def test_a_mutation_is_made_in_a_copy_and_killed_by_a_marked_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (ROOT / FILE).read_text(encoding="utf-8")
    killed = {"old": LINE, "new": "return size_bytes // block_bytes + 1"}
    equal = {"old": LINE, "new": "return int(size_bytes // block_bytes)"}
    assert mutate.main(listed(tmp_path, killed, equal)) == 1
    output = capsys.readouterr().out
    assert f"killed    OFF-11 in {FILE} (a rule)\n          tests/connectors/offloading/" in output
    assert "2 mutations: 1 killed, 1 survived" in output
    assert (ROOT / FILE).read_text(encoding="utf-8") == before
