"""Random JSON schemas: few are refused, and what the masks allow conforms to the schema."""

import json
import random
from collections import Counter
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.process.structured_output.backends import Backends
from longshore.scheduler.process.structured_output.schema_support import BackendName
from tests.harness.json_schemas import json_schemas
from tests.harness.vocabularies import sampled_text, small_vocabulary

MAX_ENDLESS = 0.02
MAX_TOKENS = 600
MAX_FREE = 40


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("backend", "max_refused"),
    [("llguidance", 0.2), pytest.param("xgrammar", 0.8, marks=pytest.mark.services)],
)
def test_few_schemas_are_refused_and_outputs_conform_to_the_others(
    backend: BackendName, max_refused: float, long_run: bool
) -> None:
    """Each output has random tokens at first, and then those that end it. So an output that was
    cut within the first ones begins a valid one."""
    vocabulary = small_vocabulary()
    backends = Backends((backend,), vocabulary)
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
        rng = random.Random(seed)
        num_free = rng.randrange(MAX_FREE)
        text = sampled_text(
            grammar.matcher(), vocabulary, rng, num_free=num_free, max_tokens=MAX_TOKENS
        )
        if text is None:
            counts["endless"] += 1
        else:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)

    run()
    print(dict(counts))
    assert counts["refused"] <= max_refused * counts["schemas"]
    assert counts["endless"] <= MAX_ENDLESS * counts["schemas"]
