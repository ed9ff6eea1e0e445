"""Random requests with every feature."""

import random
from typing import Any, Final

from longshore.protocol.requests import LoRARequest, MultimodalFeature, PoolingParams
from tests.harness.driver import Driver
from tests.harness.grammar import grammar_for
from tests.harness.tokens import prompt_of

KINDS: Final = {
    "text": 8,
    "session": 2,
    "fork": 3,
    "grammar": 4,
    "item": 2,
    "adapter": 2,
    "pooling": 1,
    "scored": 1,
}
"""How often a request is of each kind."""


def random_kinds(chance: random.Random) -> dict[str, int]:
    """Some of the kinds, and plain text always; now and then all."""
    if chance.random() < 0.4:
        return dict(KINDS)
    return {
        kind: weight for kind, weight in KINDS.items() if kind == "text" or chance.random() < 0.5
    }


class RandomRequests:
    """Draws requests for one driver. kinds: weights, see `KINDS`."""

    def __init__(self, chance: random.Random, driver: Driver, kinds: dict[str, int]) -> None:
        self._chance = chance
        self._driver = driver
        self._kinds = kinds

    def draw(self) -> tuple[str, str, list[int], dict[str, Any]]:
        """Kind, request id, prompt, and the other arguments of `Driver.add`. Now and then the id
        was used before."""
        chance, driver = self._chance, self._driver
        number = len(driver.names)
        (kind,) = chance.choices(list(self._kinds), list(self._kinds.values()))
        request_id = f"{kind}{number}"
        if kind in ("text", "adapter") and number and chance.random() < 0.05:
            request_id = chance.choice(list(driver.names.values()))
        prompt = [7] * chance.choice([0, 4, 9, 13]) + [20 + number % 70] * chance.randrange(1, 12)
        fields: dict[str, Any] = {
            "max_tokens": chance.randrange(1, 12),
            "priority": chance.randrange(3),
            "client": chance.randrange(2),
            "cache_salt": chance.choice([None, None, None, "salt"]),
            "skip_reading_prefix_cache": chance.random() < 0.1,
            "no_store": number % 7 == 6,
        }
        match kind:
            case "session":
                fields |= {"resumable": True, "keeps_blocks": chance.random() < 0.5}
            case "fork":
                prompt = self._make_fork(fields) or prompt
            case "grammar":
                fields["structured_output"] = grammar_for(request_id)
            case "item":
                item = MultimodalFeature(chance.choice("abc"), 0, chance.randrange(2, 6))
                prompt = prompt_of(item.num_tokens, 60) + prompt
                fields["multimodal"] = (item,)
            case "adapter":
                fields["lora"] = LoRARequest(chance.choice("xyz"))
            case "pooling":
                fields["pooling"] = PoolingParams()
            case "scored":
                fields["sampling"] = {"logprobs": 1, "prompt_logprobs": chance.choice([None, 0])}
        return kind, request_id, prompt, fields

    def _make_fork(self, fields: dict[str, Any]) -> list[int]:
        """Set what the fork of some request has in common with it; returns the prompt."""
        parents = [
            key
            for key, name in self._driver.names.items()
            if key not in self._driver.finished and not name.startswith(("item", "pooling"))
        ]
        if not parents:
            return []
        client, handle = key = self._chance.choice(parents)
        parent = self._driver.requests[self._driver.names[key]]
        fields |= {"client": client, "fork_of": handle}
        fields |= {"cache_salt": parent.options.cache_salt, "lora": parent.options.lora}
        fields["no_store"] = parent.options.no_store
        tokens = [*parent.token_ids.tolist(), 20 + handle % 70]
        return tokens[: self._chance.randrange(1, 30)]
