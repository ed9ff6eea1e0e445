"""Hand-computed cases from the checklist, as tables for `script.play`.

Block size 4 and one plan in flight unless a scenario says otherwise. Prompts are ranges of token
ids, so equal ranges are equal content; sampled tokens are 90 and above, or stop ids.
"""

from typing import Final

from tests.oracle.scenarios.block_order import BLOCK_ORDER
from tests.oracle.scenarios.budget import BUDGET
from tests.oracle.scenarios.features import DRAFTS, OTHERS
from tests.oracle.scenarios.gates import GATES
from tests.oracle.scenarios.in_flight import IN_FLIGHT
from tests.oracle.scenarios.loads import LOADS
from tests.oracle.scenarios.preemption import PREEMPTION
from tests.oracle.scenarios.prefix_cache import PREFIX_CACHE
from tests.oracle.scenarios.requests import REQUESTS

SCENARIOS: Final = (
    *PREFIX_CACHE,
    *BLOCK_ORDER,
    *BUDGET,
    *PREEMPTION,
    *REQUESTS,
    *IN_FLIGHT,
    *GATES,
    *DRAFTS,
    *OTHERS,
    *LOADS,
)
