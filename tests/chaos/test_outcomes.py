from tests.chaos.outcomes import Outcome, report


def test_the_report_counts_and_orders_what_each_fault_did() -> None:
    times_s = [0.5, 0.1, 0.3, 0.2]
    outcomes = [Outcome("killed", "a worker", 30, 2, time_s) for time_s in times_s]
    outcomes.append(Outcome("drain", "a signal", 0, 32, None))
    assert report(outcomes).splitlines()[2:] == [
        "| killed | a worker | 4 | 120 | 8 | 0.20 s | 0.50 s |",
        "| drain | a signal | 1 | 0 | 32 |  |  |",
    ]
