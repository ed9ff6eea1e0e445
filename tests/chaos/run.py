"""Applies faults to a deployment under load, one after the other, and checks it after each."""

import random
import time
from collections.abc import Iterable
from pathlib import Path

from tests.chaos.faults import Fault
from tests.chaos.outcomes import Outcome
from tests.chaos.setups import Setup
from tests.chaos.streams import COMPLETE, Load, make_prompts
from tests.chaos.target import Target, check_nothing_is_left

MAX_WAIT_S = 0.5


def run_faults(
    setup: Setup, faults: Iterable[Fault], model: Path, folder: Path, seed: int
) -> list[Outcome]:
    """Start a deployment and apply the faults. Raises AssertionError, which names the fault."""
    prompts = make_prompts(seed)
    chance = random.Random(seed)
    outcomes: list[Outcome] = []
    begin_s = time.monotonic()
    with setup(model, folder, prompts) as target:
        target.run_calmly()
        for fault in faults:
            try:
                outcomes.append(run_fault(target, fault, chance))
                print(f"{time.monotonic() - begin_s:6.1f} s  {outcomes[-1]}")
            except BaseException as error:
                error.add_note(f"{fault.kind}: {fault.what}, seed {seed}")
                error.add_note(target.deployment.output[-6000:])
                raise
        target.run_calmly()
        assert target.deployment.stop() == 0, target.deployment.output
        check_nothing_is_left(target.deployment)
    return outcomes


def run_fault(target: Target, fault: Fault, chance: random.Random) -> Outcome:
    """Apply one fault under load, wait until the deployment has recovered, and check everything."""
    target.victims.clear()
    target.cut_ports.clear()
    with Load(target.deployment.url, target.prompts, seed=chance.getrandbits(32)) as load:
        target.load = load
        load.wait_for_tokens()
        time.sleep(chance.uniform(0.0, MAX_WAIT_S))
        begin_s = time.monotonic()
        fault.inject(target)
        load.stop_asking()  # starting processes need the processors; the next fault's load asks
        streams = load.finish()
        recovery_s = load.longest_gap_s(begin_s)
    target.wait_until_whole()
    wrong = target.wrong_streams(streams)
    assert not wrong, wrong[:10]
    target.check_books()
    num_complete = sum(stream.end == COMPLETE for stream in streams)
    return Outcome(fault.kind, fault.what, num_complete, len(streams) - num_complete, recovery_s)
