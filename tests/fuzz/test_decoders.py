"""Messages between processes: whatever arrives is a message, or a ProtocolError."""

import random
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from longshore.protocol.errors import ProtocolError
from longshore.protocol.transport.codec import Decoder, Encoder
from tests.fuzz.mutations import mutated_bytes
from tests.protocol.transport.test_codec import DIRECTIONS

NUM_MESSAGES = 50
NUM_MUTATIONS = 300  # of each


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_mutated_message_is_a_message_or_a_protocol_error(
    direction: tuple[Any, Any], long_run: bool
) -> None:
    union, strategies = direction
    decoder = Decoder[Any](union)
    outcomes = {True: 0, False: 0}

    @settings(
        max_examples=NUM_MESSAGES,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.one_of(*strategies.values()), st.integers())
    def check(message: Any, seed: int) -> None:
        rng = random.Random(seed)
        frames = [bytes(frame) for frame in Encoder[Any]().encode(message)]
        for _ in range(NUM_MUTATIONS * (20 if long_run else 1)):
            changed = list(frames)
            index = rng.choice((0, rng.randrange(len(frames))))
            changed[index] = mutated_bytes(changed[index], rng)
            try:
                received = decoder.decode(changed)
            except ProtocolError:
                outcomes[False] += 1
            else:
                assert isinstance(received, get_args(union))
                outcomes[True] += 1

    check()
    assert sum(outcomes.values()) >= NUM_MESSAGES * NUM_MUTATIONS
    assert min(outcomes.values()) > 0
