"""Usage in every chunk of a stream (`continuous_usage_stats`, as in vLLM)."""

from longshore.deploy.gateway.api.usage import Usage
from longshore.deploy.requests.generation_spec import Piece


class UsageSoFar:
    """The tokens of an HTTP request up to a chunk: prompts whose answers have begun, and output."""

    def __init__(self) -> None:
        self._prompts: set[int] = set()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def after(self, piece: Piece) -> Usage:
        """The usage up to and including `piece`."""
        prompt = piece.prompt
        if prompt is not None and prompt.number not in self._prompts:
            self._prompts.add(prompt.number)
            self._num_prompt_tokens += len(prompt.token_ids)
        self._num_output_tokens += len(piece.token_ids)
        total = self._num_prompt_tokens + self._num_output_tokens
        return Usage(self._num_prompt_tokens, self._num_output_tokens, total)
