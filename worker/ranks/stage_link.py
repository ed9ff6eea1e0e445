"""Transfer of hidden states from one pipeline stage to the next.

Sending does not wait for the receiver, which may still compute the previous step, so each tensor is
kept until it has been sent. All calls are on the compute queue. Stages as in GPipe (Huang et al.,
2019), with whole steps as micro-batches.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.worker.ranks.parallel import Parallel


class StageLink:
    """This rank's links to the previous and the next stage.

    hidden_size, dtype, device: properties of the hidden states.
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
        """(num_tokens, hidden_size) from the previous stage."""
        out = torch.empty((num_tokens, self._hidden_size), dtype=self._dtype, device=self._device)
        return self._parallel.receive(out)

    def finish(self) -> None:
        """Wait until the next stage has received everything. If a rank exits earlier, tensors in
        transit are lost."""
        while self._sending:
            self._parallel.finish_sending(self._sending.popleft()[0])

    def send(self, hidden: Tensor) -> None:
        """Send (n, hidden_size) to the next stage. The caller must not change the tensor later.

        Blocks if as many sends as there are stages are still in transit.
        """
        while len(self._sending) >= self._parallel.num_stages:
            self._parallel.finish_sending(self._sending.popleft()[0])
        hidden = hidden.contiguous()
        self._sending.append((self._parallel.send(hidden), hidden))
