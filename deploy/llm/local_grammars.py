"""Grammars of an engine in the caller's process, for tests and debugging: compiling a large one
holds up the caller."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from longshore.deploy.supervisor.engine_plan import EnginePlan
from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.features.grammar import GrammarError, InvalidGrammar, TokenMasks
from longshore.scheduler.process.structured_output.backends import Backends
from longshore.scheduler.process.structured_output.matcher import Matcher
from longshore.scheduler.process.structured_output.process import MaskWords, fill_row, packed
from longshore.scheduler.process.structured_output.schema_support import installed_backends
from longshore.scheduler.process.structured_output.vocabulary import load_vocabulary


class LocalGrammars:
    """See `GrammarCompiler`. Libraries are imported for the first grammar."""

    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan
        self._backends: Backends | None = None
        self._compiled: deque[int] = deque()

    def compile(self, grammar_id: int, spec: StructuredOutput) -> "LocalGrammar":
        self._compiled.append(grammar_id)
        try:
            matcher = self._loaded().compile(spec).matcher()
        except GrammarError as error:
            return _Invalid(str(error))
        return LocalGrammar(matcher, self._plan.model.vocab_size)

    def next_compiled(self) -> int | None:
        return self._compiled.popleft() if self._compiled else None

    def _loaded(self) -> Backends:
        model = self._plan.model
        if self._backends is None:
            if model.tokenizer_file is None:
                raise GrammarError(f"{model.path} has no tokenizer")
            vocabulary = load_vocabulary(
                model.tokenizer_file,
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
            )
            names = installed_backends(self._plan.options.structured_output_backend)
            self._backends = Backends(names, vocabulary)
        return self._backends

    def flush(self) -> None:
        """Masks are computed when they are asked for."""


class LocalGrammar:
    """See `Grammar`."""

    def __init__(self, matcher: Matcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def is_compiled(self) -> bool:
        return True

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        for num_accepted, token_id in enumerate(token_ids):
            words = self._words(1)
            self._matcher.fill(words[0])
            if not words[0, token_id >> 5] >> (token_id & 31) & 1:
                self._matcher.rollback(num_accepted)
                return False
            self._matcher.accept(token_id)
        return True

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)  # the masks show which drafts are not allowed

    def fill_masks(self, draft_token_ids: Sequence[int], masks: TokenMasks) -> bool:
        words = self._words(len(masks))
        fill_row(self._matcher, draft_token_ids, words)
        masks[:] = packed(words, self._vocab_size).reshape(masks.shape)
        return True

    def release(self) -> None:
        """Nothing is kept."""

    def _words(self, num_masks: int) -> MaskWords:
        return np.zeros((num_masks, -(-self._vocab_size // 32)), np.int32)


class _Invalid(LocalGrammar):
    """One that cannot be compiled."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def is_compiled(self) -> bool:
        raise InvalidGrammar(self._reason)
