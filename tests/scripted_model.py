"""A checkpoint that says what a test wants: its next token depends on the last token only."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from tokenizers import AddedToken

from tests.deploy.tiny_tokenizer import BOS_ID, EOS, EOS_ID, byte_level_tokenizer, save_tokenizer
from tests.models import make_tiny_llama

VOCAB_SIZE: Final = 384
LOGIT: Final = 10.0


def make_scripted_model(
    path: Path, answers: Mapping[str, Sequence[str]], chat_template: str
) -> None:
    """answers: by the special token that ends the prompt, the tokens of the answer. All of them
    must be different."""
    import torch

    tokenizer = byte_level_tokenizer()
    save_tokenizer(path, chat_template=chat_template)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in answers])
    pieces = [piece for answer in answers.values() for piece in answer]
    assert len(set(pieces)) == len(pieces)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.save(str(path / "tokenizer.json"))
    model = make_tiny_llama(
        path,
        vocab_size=VOCAB_SIZE,
        hidden_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        tie_word_embeddings=False,
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB_SIZE))
        model.lm_head.weight.zero_()
        for start, answer in answers.items():
            ids = [tokenizer.token_to_id(token) for token in (start, *answer, EOS)]
            for token_id, following in pairwise(ids):
                model.lm_head.weight[following, token_id] = LOGIT
    model.save_pretrained(path)
