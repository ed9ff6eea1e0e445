"""Which requests are in the next step when a pipeline of stages has several steps to run at a time.

A request's next token needs the one before it, which the last stage samples and the next plan
brings to the first: so a request with a token on its way waits, and the others fill the pipeline.
Were all that decode in one step, all of them would wait for it; each step takes its share.
"""

import numpy as np

from longshore.protocol.arrays import Int64Array
from longshore.scheduler.step.running import RunningTable


def share_of_step(wanted: Int64Array, running: RunningTable, num_steps: int) -> Int64Array:
    """What of `wanted`, (max_num_seqs,) tokens, may be in the next of `num_steps` steps.

    Chunks of prompts need no token and are not held back. Of the rows that decode, the first in
    admission order take part, one in `num_steps` of all that run; the rest are first in the steps
    that follow, because these then wait for their tokens.
    """
    wanted = np.where(running.num_placeholders > 0, 0, wanted)
    order = running.order
    decoding = order[(wanted[order] > 0) & (running.num_computed >= running.num_known)[order]]
    wanted[decoding[-(-len(order) // num_steps) :]] = 0
    return wanted
