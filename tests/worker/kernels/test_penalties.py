"""The penalties of a GPU, in Triton's interpreter, against those of torch."""

import pytest
import torch

from longshore.worker.kernels.penalties import penalise
from longshore.worker.sampling.penalties import Penalties
from longshore.worker.step.token_table import TokenTable
from tests.worker.kernels.variants import in_triton


def made_up(num_tokens: list[int], vocab_size: int) -> tuple[Penalties, TokenTable, torch.Tensor]:
    """A row per number of tokens, in a table of more rows, and the logits of more samples."""
    generator = torch.Generator().manual_seed(len(num_tokens))
    count, longest = len(num_tokens), max(num_tokens)
    lens = torch.tensor(num_tokens)
    tokens = TokenTable(count + 2, longest + 3, torch.device("cpu"))
    tokens.ids.random_(0, vocab_size, generator=generator)
    penalties = Penalties(
        samples=torch.randperm(count + 1, generator=generator)[:count],
        rows=torch.randperm(count + 2, generator=generator)[:count],
        num_prompt=1 + (torch.rand(count, generator=generator) * lens).long().clamp_max(lens - 1),
        num_tokens=lens,
        repetition=torch.rand(count, generator=generator) + 0.5,
        presence=torch.rand(count, generator=generator) - 0.3,
        frequency=torch.rand(count, generator=generator) - 0.3,
        longest=longest,
    )
    return penalties, tokens, torch.randn(count + 1, vocab_size, generator=generator) * 3


@pytest.mark.parametrize("num_tokens", [[1], [1023, 5], [1024, 1], [1025, 700, 2]], ids=str)
@pytest.mark.parametrize("vocab_size", [3, 500])
def test_every_token_that_occurs_is_penalised_once(num_tokens: list[int], vocab_size: int) -> None:
    penalties, tokens, logits = made_up(num_tokens, vocab_size)
    wanted, got = logits.clone(), logits.clone()
    penalties.apply(wanted, tokens)
    with in_triton():
        penalties.apply(got, tokens)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(got == logits, wanted == logits)
    assert not torch.equal(got, logits)


def test_wrong_shapes_and_dtypes_are_rejected() -> None:
    penalties, tokens, logits = made_up([4, 2], 10)
    columns = {
        name: getattr(penalties, name)
        for name in (
            *("samples", "rows", "num_prompt", "num_tokens"),
            *("repetition", "presence", "frequency"),
        )
    }
    for wrong in (logits.double(), logits[:, 1:], logits[0]):
        with pytest.raises(ValueError, match="logits"):
            penalise(wrong, tokens.ids, **columns, longest=4)
    for wrong in (tokens.ids.long(), tokens.ids[:, :3]):
        with pytest.raises(ValueError, match="token ids"):
            penalise(logits, wrong, **columns, longest=4)
