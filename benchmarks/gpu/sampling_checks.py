"""The kernels of sampling against float64."""

from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.exactness import poisoned_memory
from benchmarks.gpu.results import Run
from longshore.worker.kernels import draw_tokens, logprobs, penalties, token_masks
from tests.worker.kernels.test_draw_tokens import MIXED, draws_of, expected
from tests.worker.kernels.test_penalties import made_up

TOLERANCE: Final = 1e-4


def check(run: Run) -> None:
    for vocab_size in (301,) if run.is_dry else (301, 32_000, 151_936):
        name = f"of {vocab_size:,} tokens"
        run.check(f"draws {name}", partial(_check_draws, run.device, vocab_size))
        run.check(f"scores {name}", partial(_check_scores, run.device, vocab_size))
        run.check(f"penalties {name}", partial(_check_penalties, run.device, vocab_size))
        run.check(f"token masks {name}", partial(_check_masks, run.device, vocab_size))


def _check_draws(device: str, vocab_size: int) -> None:
    """A number within rounding of the border between two tokens may draw either; there is hardly
    any."""
    settings = MIXED * 4
    logits, u = 3 * torch.randn(len(settings), vocab_size), torch.rand(len(settings)).tolist()
    draws = draws_of(u, settings)
    names = ("rows", "top_k", "top_p", "u", "temperature", "min_p")
    columns = {name: getattr(draws, name).to(device) for name in names}
    on_device = logits.to(device)
    best = on_device.argmax(-1)
    with poisoned_memory():
        draw_tokens.draw_tokens(on_device, best, **columns)
    wanted = [expected(*each) for each in zip(logits, u, settings, strict=True)]
    num_different = sum(one != other for one, other in zip(best.tolist(), wanted, strict=True))
    assert num_different <= 1, f"{num_different} of {len(wanted)} tokens are others"


def _check_scores(device: str, vocab_size: int) -> None:
    logits = torch.randn(5, vocab_size + 3, device=device)[:, :vocab_size]
    token_ids = torch.randint(vocab_size, (5,), device=device, dtype=torch.int32)
    best = logits.topk(4).indices
    with poisoned_memory():
        ranks, listed, scores = logprobs.score(logits, token_ids, best)
    assert torch.equal(listed, torch.cat((token_ids[:, None], best), dim=1).to(listed))
    exact = logits.double().log_softmax(-1).gather(1, listed.long())
    _assert_close(scores, exact)
    chosen = logits.gather(1, token_ids[:, None].long())
    assert torch.equal(ranks.long(), 1 + (logits > chosen).sum(1))


def _check_penalties(device: str, vocab_size: int) -> None:
    """Each token of a row counts once for the repetition, and each output for the frequency."""
    about, table, logits = made_up([1023, 5, 1025], vocab_size)
    exact = logits.double()
    for index, sample in enumerate(about.samples.tolist()):
        ids = table.ids[about.rows[index], : about.num_tokens[index]].long()
        outputs = ids[about.num_prompt[index] :].bincount(minlength=vocab_size)
        occurs, line = ids.bincount(minlength=vocab_size) > 0, exact[sample]
        factor = about.repetition[index].double()
        line[occurs] = torch.where(line > 0, line / factor, line * factor)[occurs]
        line -= about.frequency[index].double() * outputs
        line -= about.presence[index].double() * (outputs > 0)
    names = "samples", "rows", "num_prompt", "num_tokens", "repetition", "presence", "frequency"
    columns = {name: getattr(about, name).to(device) for name in names}
    got = logits.to(device)
    with poisoned_memory():
        penalties.penalise(got, table.ids.to(device), **columns, longest=about.longest)
    _assert_close(got.cpu(), exact)


def _check_masks(device: str, vocab_size: int) -> None:
    logits = torch.randn(4, vocab_size, device=device)
    allowed = np.random.default_rng(0).random((2, vocab_size)) < 0.5
    bits = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little")).to(device)
    samples, exact = torch.tensor([2, 0], device=device), logits.clone()
    exact[samples] = exact[samples].masked_fill(
        ~torch.from_numpy(allowed).to(device), float("-inf")
    )
    token_masks.forbid_tokens(logits, samples, bits, None)
    assert torch.equal(logits, exact)


def _assert_close(got: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(got.double(), exact, rtol=TOLERANCE, atol=TOLERANCE)
