"""Hidden states on their way from one pipeline stage to the next.

Sending does not wait for the receiver, which may be a step behind; so each tensor is kept until it
has gone. All calls are on the compute queue. Stages as in GPipe (Huang et al., 2019), with whole
steps for micro-batches.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.worker.ranks.parallel import Parallel


class StageLink:
    """The ends that this rank holds of the links to its neighbours.

    hidden_size, dtype, device: of the hidden states.
    """

    def __init__(
        self, parallel: Parallel, *, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parallel = parallel
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, num_tokens: int) -> Tensor:
        """(num_tokens, hidden_size) of the stage before."""
        out = torch.empty((num_tokens, self._hidden_size), dtype=self._dtype, device=self._device)
        return self._parallel.receive(out)

    def finish(self) -> None:
        """Wait until the next stage has taken everything: a rank that leaves earlier takes what is
        on its way along."""
        while self._sending:
            self._parallel.finish_sending(self._sending.popleft()[0])

    def send(self, hidden: Tensor) -> None:
        """(n, hidden_size) to the next stage. The caller must not change it any more.

        Waits if the stages behind are as many steps late as there are stages.
        """
        while len(self._sending) >= self._parallel.num_stages:
            self._parallel.finish_sending(self._sending.popleft()[0])
        hidden = hidden.contiguous()
        self._sending.append((self._parallel.send(hidden), hidden))
