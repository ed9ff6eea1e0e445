"""A drafter that knows the answers, and makes mistakes."""

import json
from collections.abc import Sequence
from pathlib import Path

from longshore.protocol.arrays import Int32Array
from longshore.worker.drafting.config import SpeculativeConfig
from longshore.worker.drafting.drafter import Drafter


class HalfRight(Drafter):
    """options: `answers`, a file with lists of all tokens of requests; `wrong`, the share of drafts
    that are wrong, as a number of 7; `log`, a file that counts the proposals."""

    def __init__(self, config: SpeculativeConfig) -> None:
        answers = json.loads(Path(config.options["answers"]).read_text())
        self._answers = [tuple(answer) for answer in answers]
        self._wrong = config.options["wrong"]
        self._rows: dict[int, list[int]] = {}

    def start(self, row: int, token_ids: Int32Array, num_prompt: int) -> None:
        self._rows[row] = token_ids.tolist()

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        self._rows[row] += token_ids

    def rewind(self, row: int, num_tokens: int) -> None:
        del self._rows[row][num_tokens:]

    def propose(self, row: int, max_tokens: int) -> Sequence[int]:
        known = tuple(self._rows[row])
        for answer in self._answers:
            if answer[: len(known)] == known:
                rest = enumerate(answer[len(known) : len(known) + max_tokens], start=len(known))
                return [self._draft(token_id, place) for place, token_id in rest]
        return ()

    def _draft(self, token_id: int, place: int) -> int:
        is_wrong = (5 * place + len(self._rows)) % 7 < self._wrong
        return 3 + (token_id + 1) % 100 if is_wrong else token_id

    def end(self, row: int, *, is_finished: bool) -> None:
        del self._rows[row]
