"""Outputs of the reference implementation, and how outputs are compared with them.

In fp32, no path through the system may change a greedy token, except where the best two logits of
the reference are within TIE of each other. At most 1 % of the sequences may differ in this way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

TIE: Final = 1e-5
MAX_TIED_SHARE: Final = 0.01


@dataclass(frozen=True)
class ReferenceAnswer:
    """Greedy tokens, and the distance of the second-best logit at each of them."""

    token_ids: list[int]
    margins: list[float]


def greedy_reference(model: Any, prompt: Sequence[int], num_tokens: int) -> ReferenceAnswer:
    """`num_tokens` greedy tokens of a transformers model, end-of-sequence ids ignored: what its
    `generate` computes, without its per-token overhead."""
    import torch

    token_ids: list[int] = []
    margins: list[float] = []
    with torch.inference_mode():
        inputs, caches = torch.tensor([list(prompt)]), {}
        for _ in range(num_tokens):
            first = len(prompt) + len(token_ids) - inputs.shape[1]
            positions = torch.arange(first, first + inputs.shape[1]).unsqueeze(0)  # some need them
            output = model(inputs, position_ids=positions, use_cache=True, **caches)
            best = output.logits[0, -1].topk(2)
            token_ids.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            inputs = best.indices[None, :1]
            caches = caches_of(output)
    return ReferenceAnswer(token_ids, margins)


def caches_of(output: Any) -> dict[str, Any]:
    """What a transformers model remembers, as arguments of its next call. Since transformers 5.24
    its name is the same for attention and states."""
    names = ("cache",) if "cache" in output else ("past_key_values", "cache_params")
    return {name: output[name] for name in names if name in output}


def is_tied_difference(answer: Sequence[int], reference: ReferenceAnswer, tie: float = TIE) -> bool:
    """Whether the sequences differ from a tie on. False if they are equal. Raises AssertionError if
    they differ anywhere else."""
    assert len(answer) == len(reference.token_ids)
    for position, (got, wanted) in enumerate(zip(answer, reference.token_ids, strict=True)):
        if got != wanted:
            margin = reference.margins[position]
            assert margin < tie, f"token {position} is {got}, not {wanted} (margin {margin:.2e})"
            return True
    return False


def assert_greedy_equal(
    answers: Sequence[Sequence[int]], references: Sequence[ReferenceAnswer], *, tie: float = TIE
) -> None:
    """Assert that all answers are equal to the reference, except for at most 1 % that differ from a
    tie on."""
    assert len(answers) == len(references)
    num_tied = sum(
        is_tied_difference(answer, reference, tie)
        for answer, reference in zip(answers, references, strict=True)
    )
    assert num_tied <= MAX_TIED_SHARE * len(answers), f"{num_tied} of {len(answers)} are tied"


def experts_reference(model: Any, token_ids: Sequence[int]) -> Any:
    """(num_tokens, num_layers, top_k) experts that the routers of a transformers model choose, each
    token's in ascending order."""
    import numpy as np
    import torch

    chosen: list[Any] = []

    def note(router: Any, _: object, outputs: Any) -> None:
        best = outputs[2] if len(outputs) == 3 else outputs[1].topk(router.top_k).indices
        chosen.append(best.sort(dim=-1).values)

    routers = [module for module in model.modules() if "router" in type(module).__name__.lower()]
    hooks = [router.register_forward_hook(note) for router in routers]
    with torch.inference_mode():
        model(torch.tensor([list(token_ids)]))
    for hook in hooks:
        hook.remove()
    return np.stack([each.numpy() for each in chosen], axis=1)


def assert_experts_are_those_of(model: Any, experts: Any, token_ids: Sequence[int]) -> None:
    """experts: of all tokens but the last, as an output has them."""
    import numpy as np

    wanted = experts_reference(model, token_ids)[:-1]
    assert experts.shape == wanted.shape
    np.testing.assert_array_equal(np.sort(experts, axis=-1), wanted)
