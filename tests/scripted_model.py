"""Checkpoints that say what a test wants: the next token depends on the last token only.

The chat template ends a prompt with the special token that begins an answer, so it decides by what
the prompt holds. Everything else is real: tokenizer, engine, worker and parsers.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.conftest import ROOT
from tests.deploy.tiny_tokenizer import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    byte_level_tokenizer,
    save_tokenizer,
)
from tests.models import make_tiny_llama

LOGIT: Final = 30.0  # sampled with any temperature up to 2, too
PIECE_CHARACTERS: Final = 8
ASIDE: Final = "<|aside|>"
LOST: Final = "<|lost|>"


def make_scripted_model(
    path: Path,
    answers: Mapping[str, Sequence[str]],
    chat_template: str,
    *,
    tokenizer: Tokenizer | None = None,
    max_model_len: int = 4096,
) -> None:
    """answers: by the special token that ends the prompt, the tokens of the answer. All of them
    must be different. tokenizer: to which they are added; None: one of bytes."""
    import torch

    if tokenizer is None:
        tokenizer = byte_level_tokenizer()
    save_tokenizer(path, chat_template=chat_template)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in answers])
    pieces = [piece for answer in answers.values() for piece in answer]
    assert len(set(pieces)) == len(pieces)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.save(str(path / "tokenizer.json"))
    scripted = [tokenizer.token_to_id(token) for token in (*answers, *pieces)]
    model = make_tiny_llama(
        path,
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=len(scripted),
        num_attention_heads=1,
        num_key_value_heads=1,
        num_hidden_layers=1,
        head_dim=16,
        max_position_embeddings=max_model_len,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        tie_word_embeddings=False,
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[scripted] = torch.eye(len(scripted))
        model.lm_head.weight.zero_()
        for start, answer in answers.items():
            ids = [tokenizer.token_to_id(token) for token in (start, *answer, EOS)]
            for token_id, following in pairwise(ids):
                model.lm_head.weight[following, scripted.index(token_id)] = LOGIT
    model.save_pretrained(path)


class Turn(NamedTuple):
    """The model says `answer` if what came since its last answer contains `after`."""

    after: str
    answer: str


def call(name: str, /, **arguments: object) -> str:
    """A call of a tool, as the model writes it."""
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def forced_call(name: str, /, **arguments: object) -> str:
    """A call as the model writes it for `tool_choice: required`."""
    return json.dumps([{"name": name, "parameters": arguments}])


def make_agent_model(path: Path, tasks: Mapping[str, Sequence[Turn]]) -> None:
    """A model that does tasks: the user's message says `Task NAME:`. It answers requests without
    tools by a short text, and says that it is lost if a turn's `after` is missing."""
    path.mkdir(exist_ok=True)
    texts = {ASIDE: "A title", LOST: "I am lost."}
    for name, turns in tasks.items():
        texts |= {f"<|{name}.{number}|>": turn.answer for number, turn in enumerate(turns)}
    used: set[str] = set()
    answers = {start: _pieces(text, used) for start, text in texts.items()}
    expected = {name: [turn.after for turn in turns] for name, turns in tasks.items()}
    template = _TEMPLATE.replace("EXPECTED", json.dumps(expected))
    make_scripted_model(
        path, answers, template, tokenizer=_learned_tokenizer(), max_model_len=131_072
    )


def _pieces(text: str, used: set[str]) -> Sequence[str]:
    """The text in parts of which none is in `used`, to which they are added."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        end = start + PIECE_CHARACTERS
        while text[start:end] in used and end < len(text):
            end += 1
        piece = text[start:end]
        while piece in used:  # the end of another answer, too
            piece = pieces.pop() + piece
        pieces.append(piece)
        used.add(piece)
        start = end
    return pieces


def _learned_tokenizer() -> Tokenizer:
    """About four characters of English per token, because prompts of agents are long."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


_TEMPLATE: Final = """\
{%- set expected = EXPECTED -%}
{%- set state = namespace(task='', turn=0, recent='', last='') -%}
{{- bos_token -}}
{%- if tools -%}
{{- '[tools]\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- 'Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{- raise_exception('System message must be at the beginning.') -}}
{%- endif -%}
{%- set text = message.content or '' -%}
{{- '[' + message.role + ']\\n' -}}
{%- if message.reasoning_content -%}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- text + '\\n' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>\\n' -}}
{%- endfor -%}
{%- if message.role == 'assistant' -%}
{%- set state.turn = state.turn + (0 if state.last == 'assistant' else 1) -%}
{%- set state.recent = '' -%}
{%- else -%}
{%- set state.recent = state.recent + text -%}
{%- for name in expected -%}
{%- if not state.task and 'Task ' + name + ':' in text -%}
{%- set state.task = name -%}
{%- set state.turn = 0 -%}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- set state.last = message.role -%}
{%- endfor -%}
{{- '[assistant]\\n' -}}
{%- if not (tools and state.task) -%}
{{- '<|aside|>' -}}
{%- elif state.turn < expected[state.task] | length
    and expected[state.task][state.turn] in state.recent -%}
{{- '<|' + state.task + '.' + state.turn | string + '|>' -}}
{%- else -%}
{{- '<|lost|>' -}}
{%- endif -%}
"""
