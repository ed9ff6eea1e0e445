"""Random JSON schemas: few are refused, and what the masks allow conforms to the schema."""

import json
import random
from collections import Counter
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.structured_output.backends import Backends
from tests.harness.json_schemas import json_schemas
from tests.harness.vocabularies import sampled_text, small_vocabulary

MAX_REFUSED = 0.2


def test_few_schemas_are_refused_and_outputs_conform_to_the_others(long_run: bool) -> None:
    vocabulary = small_vocabulary()
    backends = Backends(("llguidance",), vocabulary)
    counts: Counter[str] = Counter()

    @settings(
        max_examples=10_000 if long_run else 200,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(json_schemas(), st.integers(0, 2**32))
    def run(schema: Any, seed: int) -> None:
        counts["schemas"] += 1
        try:
            grammar = backends.compile(StructuredOutput("json_schema", json.dumps(schema)))
        except GrammarError:
            counts["refused"] += 1
            return
        text = sampled_text(grammar.matcher(), vocabulary, random.Random(seed))
        if text is not None:
            counts["ended"] += 1
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)

    run()
    assert counts["refused"] <= MAX_REFUSED * counts["schemas"]
    assert counts["ended"] >= 0.7 * (counts["schemas"] - counts["refused"])
