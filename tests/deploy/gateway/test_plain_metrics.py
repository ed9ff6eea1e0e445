"""The cheap metrics look like the client library's when they are scraped."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from longshore.deploy.gateway.plain_metrics import PlainCounter, PlainHistogram

BUCKETS = (0.001, 0.0025, 0.5, 1, 30)
# Sums of these are exact in any order.
values = st.lists(st.one_of(st.integers(0, 64), st.sampled_from([0.25, 0.5, 0.75])), max_size=20)


def without_created(text: bytes) -> list[bytes]:
    return [line for line in text.splitlines() if b"_created" not in line]


@given(values)
def test_histogram_and_counter_are_scraped_as_the_library_s(observed: list[float]) -> None:
    plain, library = CollectorRegistry(), CollectorRegistry()
    ours = PlainHistogram("gap_seconds", "Gaps", buckets=BUCKETS, registry=plain)
    theirs = Histogram("gap_seconds", "Gaps", buckets=BUCKETS, registry=library)
    our_count = PlainCounter("tokens", "Tokens", registry=plain)
    their_count = Counter("tokens", "Tokens", registry=library)
    for value in observed:
        ours.observe(value, 2)
        theirs.observe(value)
        theirs.observe(value)
        our_count.inc(3)
        their_count.inc(3)
    assert without_created(generate_latest(plain)) == without_created(generate_latest(library))
