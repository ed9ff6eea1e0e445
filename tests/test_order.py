"""The order in which several processes of pytest start the test files."""

import json

from tests.conftest import DURATIONS, TESTS


def test_the_files_with_durations_exist_and_the_longest_is_first() -> None:
    durations = json.loads(DURATIONS.read_text())
    assert durations
    assert [*durations.values()] == sorted(durations.values(), reverse=True)
    assert [name for name in durations if not (TESTS / name).is_file()] == []
