"""Bounds the size of a response that is sent as a whole: it is held in memory until it is complete.

Sizes are estimates of the JSON: counting exactly would cost as much as encoding.
"""

from collections.abc import Sequence
from typing import Final

from longshore.deploy.requests.errors import RequestError, invalid
from longshore.deploy.requests.generation_spec import GenerationSpec, Piece
from longshore.deploy.requests.token_scores import TokenScore

MAX_ANSWER_BYTES: Final = 64 << 20
PIECE_BYTES: Final = 128  # of its frame
TOKEN_BYTES: Final = 4
TOKEN_ID_BYTES: Final = 8
SCORE_BYTES: Final = 128  # a token with its log probability


def check_prompt_size(spec: GenerationSpec) -> None:
    """Raise RequestError if the parts of the response that repeat the prompts are too large."""
    num_bytes, param = spec.num_echoed_characters * spec.num_samples, "echo"
    if num_bytes < (ids_bytes := spec.num_returned_prompt_ids * TOKEN_ID_BYTES):
        num_bytes, param = ids_bytes, "return_token_ids"
    if (num_listed := spec.sampling.prompt_logprobs) is not None:
        num_tokens = sum(map(len, spec.prompts)) * spec.num_samples
        num_bytes, param = num_tokens * (1 + num_listed) * SCORE_BYTES, "prompt_logprobs"
    if num_bytes > MAX_ANSWER_BYTES:
        raise _too_large(num_bytes, "Send fewer or shorter prompts, or ask for less of them", param)


def check_output_size(spec: GenerationSpec, num_tokens: int) -> None:
    """Raise RequestError if a response with this number of generated tokens is too large."""
    listed = spec.sampling.logprobs
    num_bytes = num_tokens * (TOKEN_BYTES if listed is None else (1 + listed) * SCORE_BYTES)
    if num_bytes > MAX_ANSWER_BYTES:
        raise _too_large(num_bytes, "Set stream=true or a lower max_tokens", None)


def _too_large(num_bytes: int, advice: str, param: str | None) -> RequestError:
    return invalid(
        f"the response would have about {num_bytes >> 20} MiB; the limit is "
        f"{MAX_ANSWER_BYTES >> 20} MiB. {advice}",
        param=param,
        code="response_too_large",
    )


def piece_bytes(piece: Piece) -> int:
    """The size of a piece in a response."""
    size = (
        PIECE_BYTES
        + len(piece.text)
        + len(piece.token_ids) * TOKEN_BYTES
        + _scores_bytes(piece.scores)
    )
    if piece.prompt is not None:
        size += len(piece.prompt.token_ids) * TOKEN_BYTES
        size += _scores_bytes(piece.prompt.scores or ())
    if piece.routed_experts is not None:
        size += piece.routed_experts.data.nbytes * 4 // 3  # base64
    return size


def _scores_bytes(scores: Sequence[TokenScore | None]) -> int:
    last = scores[-1] if scores else None  # a prompt's first token has no score
    return 0 if last is None else len(scores) * (1 + len(last.best)) * SCORE_BYTES
