"""One mixture of experts on the CPU, compared with other ways to compute it.

    python benchmarks/moe.py [--json F] [--repeats N] [--threads N] [--only SHAPE]

All variants get the same weights, tokens and router, and take turns. Times are minima.
`transformers` is its unmodified module (torch's grouped product). The others differ from ours only
in the product: `loop` iterates over the experts with tokens, `padded` is one batched product in
which every expert has as many rows as the busiest one. `bound` is the size of the used experts
divided by the measured read bandwidth; times can be below it if they fit in a CPU cache. `error` is
the largest difference from float64, divided by the largest value, for ours and for transformers.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import report
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from longshore.worker.kernels.gate import SILU
from longshore.worker.layers.moe import ExpertForm, MixtureOfExperts, SplitExperts
from longshore.worker.layers.moe_router import Routing
from longshore.worker.layers.placement import Placement

SHAPES: Final = {  # experts, of which per token, hidden size, width of an expert
    "tiny": (8, 2, 128, 256),
    "small": (8, 2, 512, 1024),
    "mixtral / 4": (8, 2, 1024, 3584),
    "qwen3-moe / 2": (64, 8, 1024, 384),
}
TOKENS: Final = (1, 4, 16, 64, 512)
MAX_SECONDS: Final = 2.0
"""Time limit for all turns of a row."""


class Case:
    """The same mixture in all variants; each maps (n, hidden) to (n, hidden)."""

    def __init__(self, shape: str, dtype: torch.dtype) -> None:
        self.num_experts, self.top_k, self.size, width = SHAPES[shape]
        self.expert_bytes = 3 * self.size * width * dtype.itemsize
        config = MixtralConfig(
            hidden_size=self.size,
            intermediate_size=width,
            num_local_experts=self.num_experts,
            num_experts_per_tok=self.top_k,
        )
        config._experts_implementation = "grouped_mm"
        self.theirs = MixtralSparseMoeBlock(config).requires_grad_(False)
        for parameter in self.theirs.parameters():
            parameter.normal_(std=0.05)
        self.theirs.to(dtype)
        self.exact = MixtralSparseMoeBlock(config).requires_grad_(False).double()
        self.exact.load_state_dict(self.theirs.state_dict())
        config._experts_implementation = "eager"  # read at every call; see `grouped`, `answer`
        self._config = config
        self.ours = self._our_layer(width, dtype)

    def _our_layer(self, width: int, dtype: torch.dtype) -> MixtureOfExperts:
        placement = Placement(dtype, torch.device("cpu"))
        routing = Routing(num_experts=self.num_experts, top_k=self.top_k, renormalise=True)
        form = ExpertForm(stored=SplitExperts())
        layer = MixtureOfExperts(self.size, width, routing, form, placement)
        layer.router.weight.copy_(self.theirs.gate.weight)
        for expert in range(self.num_experts):
            layer.experts.gate_up.stored(expert).copy_(self.theirs.experts.gate_up_proj[expert])
            layer.experts.down.stored(expert).copy_(self.theirs.experts.down_proj[expert])
        placement.loaded()
        return layer

    def ways(self, x: Tensor) -> dict[str, Callable[[], Tensor]]:
        return {
            "ours": lambda: self.ours(x),
            "transformers": lambda: self.grouped(self.theirs, x),
            "loop": lambda: self._with_product(x, _looped),
            "padded": lambda: self._with_product(x, _padded),
        }

    def grouped(self, block: MixtralSparseMoeBlock, x: Tensor) -> Tensor:
        self._config._experts_implementation = "grouped_mm"
        return block(x.unsqueeze(0)).squeeze(0)

    def answer(self, x: Tensor) -> Tensor:
        """The result in float64, for which torch has no grouped product."""
        self._config._experts_implementation = "eager"
        return self.exact(x.double().unsqueeze(0)).squeeze(0)

    def num_used(self, x: Tensor) -> int:
        return len(self.ours.router(x).experts.unique())

    def _with_product(
        self, x: Tensor, product: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        routed = self.ours.router(x)
        experts, order = routed.experts.view(-1).sort(stable=True)
        weights = self.theirs.experts
        hidden = product(x[order // self.top_k], experts, weights.gate_up_proj)
        out = product(SILU(hidden), experts, weights.down_proj)
        by_token = torch.empty_like(out).index_copy_(0, order, out).view(len(x), self.top_k, -1)
        return torch.bmm(routed.weights.to(x.dtype).unsqueeze(1), by_token).squeeze(1)


def _looped(x: Tensor, experts: Tensor, matrices: Tensor) -> Tensor:
    bounds = [0, *experts.bincount(minlength=len(matrices)).cumsum(0).tolist()]
    pieces = enumerate(pairwise(bounds))
    return torch.cat([F.linear(x[a:b], matrices[expert]) for expert, (a, b) in pieces if a < b])


def _padded(x: Tensor, experts: Tensor, matrices: Tensor) -> Tensor:
    counts = experts.bincount(minlength=len(matrices))
    places = torch.arange(len(x)) - (counts.cumsum(0) - counts)[experts]
    rows = x.new_zeros(len(matrices), int(counts.max()), x.shape[1])
    rows[experts, places] = x
    return torch.bmm(rows, matrices.transpose(1, 2))[experts, places]


def read_bandwidth() -> float:
    """Bytes per second of a sum over memory that fits in no cache."""
    memory = torch.ones(1 << 26)
    return memory.nbytes / least({"sum": memory.sum}, 8)["sum"]


def least(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Minimum seconds per variant, over at most `repeats` turns and one to warm up."""
    times = dict.fromkeys(ways, float("inf"))
    end = time.perf_counter() + MAX_SECONDS
    for turn in range(repeats + 1):
        if turn > 2 and time.perf_counter() > end:
            break
        for name, compute in ways.items():
            compute()  # so that the CPU cache does not depend on the previous turn
            start = time.perf_counter()
            compute()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=SHAPES, help="measure only this shape")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    rows = []
    for shape in [arguments.only] if arguments.only else SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            case = Case(shape, dtype)
            for num_tokens in TOKENS:
                x = torch.randn(num_tokens, case.size).to(dtype)
                with torch.inference_mode():
                    times = least(case.ways(x), arguments.repeats)
                    exact, ways = case.answer(x), case.ways(x)
                    errors = {name: error(ways[name](), exact) for name in ("ours", "transformers")}
                rows.append(
                    {
                        "shape": shape,
                        "dtype": str(dtype).removeprefix("torch."),
                        "tokens": num_tokens,
                        "us": {name: seconds * 1e6 for name, seconds in times.items()},
                        "bound_us": case.num_used(x) * case.expert_bytes / bandwidth * 1e6,
                        "ratio": times["transformers"] / times["ours"],
                        "error": errors,
                    }
                )
    report.write(arguments.json, rows, threads=arguments.threads, bandwidth_bytes_s=bandwidth)


if __name__ == "__main__":
    main()
