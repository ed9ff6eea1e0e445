"""Prompts as token ids that one model can compute: of texts, token ids, rendered chats and pairs of
texts, truncated with vLLM's parameters."""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeVar

from tokenizers import Encoding

from longshore.deploy.gateway.text.infilling import infilling_prompt
from longshore.deploy.gateway.text.tokenizer import (
    MAX_INLINE_CHARACTERS,
    MAX_INLINE_TEXTS,
    MAX_TOKENS_PER_CUT,
    SLICE_CHARACTERS,
    ModelTokenizer,
)
from longshore.deploy.requests.errors import PromptTooLong, RequestError, invalid

T = TypeVar("T")

AS_MANY_AS_FIT: Final = -1


class CutParameters(Protocol):
    """The parameters of a request for truncation; None: not set."""

    @property
    def truncate_prompt_tokens(self) -> int | None: ...

    @property
    def truncation_side(self) -> Literal["left", "right"] | None: ...


class PromptParameters(CutParameters, Protocol):
    """The parameters of a request for its prompts; None: not set."""

    @property
    def add_special_tokens(self) -> bool | None: ...


@dataclass(frozen=True)
class PromptCut:
    """keeps_end: remove the beginning of a prompt, otherwise its end."""

    max_tokens: int
    keeps_end: bool


@dataclass(frozen=True)
class PromptForm:
    """How prompts are read.

    cut:          how they are truncated; None: they are not.
    with_special: texts begin with the tokenizer's special tokens.
    gives_tokens: at least one output token must fit, too.
    """

    cut: PromptCut | None = None
    with_special: bool = True
    gives_tokens: bool = True


@dataclass(frozen=True)
class Text:
    """A text of a request. name: its parameter, with its index in brackets if it has one."""

    text: str
    name: str


class PromptEncoder:
    """Encodes and validates the prompts of one model. All methods raise RequestError.

    tokenizer: None: prompts must be token ids.

    `name` is what messages call a prompt: its parameter, with its index in brackets if it has one.
    `param` is the parameter if the name does not begin with it.
    """

    def __init__(
        self, tokenizer: ModelTokenizer | None, *, vocab_size: int, max_model_len: int
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    def tokenizer_for(self, param: str) -> ModelTokenizer:
        """The tokenizer, which the parameter needs."""
        if self.tokenizer is None:
            raise invalid(
                f"{param} needs a tokenizer, but the model folder has none: use "
                "prompts of token ids, without bad_words and stop",
                param=param,
            )
        return self.tokenizer

    async def off_loop_if_long(self, function: Callable[[], T], size: int, num_texts: int = 1) -> T:
        """Call it, on a thread if streams would wait for it.

        size: characters, or token ids, that it encodes and checks.
        """
        longest = MAX_INLINE_CHARACTERS
        if self.tokenizer is not None:
            longest = self.tokenizer.max_inline_characters
        if size > longest or num_texts > MAX_INLINE_TEXTS:
            return await asyncio.to_thread(function)
        return function()

    def form(
        self,
        request: PromptParameters,
        *,
        is_rendered: bool = False,
        max_output_tokens: int | None = None,
        gives_tokens: bool = True,
    ) -> PromptForm:
        """is_rendered: texts are rendered chats, whose template has added the special tokens.
        max_output_tokens: see `cut`."""
        special = request.add_special_tokens
        return PromptForm(
            self.cut(request, max_output_tokens=max_output_tokens, gives_tokens=gives_tokens),
            not is_rendered if special is None else special,
            gives_tokens,
        )

    def cut(
        self,
        request: CutParameters,
        *,
        max_output_tokens: int | None = None,
        gives_tokens: bool = True,
    ) -> PromptCut | None:
        """How prompts are truncated; None: they are not. By default their beginning is removed, and
        of prompts without output the side that the tokenizer is configured for.

        max_output_tokens: tokens to leave for the output with -1; None: one.
        """
        wanted, side = request.truncate_prompt_tokens, request.truncation_side
        if wanted is None:
            if side is not None:
                raise truncates_nothing()
            return None
        longest = self.max_model_len - gives_tokens
        if wanted == AS_MANY_AS_FIT:
            wanted = max(1, min(longest, self.max_model_len - (max_output_tokens or 0)))
        elif not 1 <= wanted <= longest:
            raise invalid(
                f"truncate_prompt_tokens={wanted} must be -1 or between 1 and {longest}, the "
                "maximum for this model",
                param="truncate_prompt_tokens",
            )
        if side is None and not gives_tokens:
            return PromptCut(wanted, self.tokenizer is not None and self.tokenizer.keeps_end)
        return PromptCut(wanted, keeps_end=side != "right")

    def token_ids(
        self, given: str | list[int], form: PromptForm, name: str, *, suffix: str = ""
    ) -> list[int]:
        """The valid token ids of a prompt. suffix: the text after the answer, for models that fill
        in the middle."""
        if isinstance(given, str):
            ids = self.encoded(given, form, name, suffix=suffix)
        elif form.cut is None:
            ids = given
        else:
            length = form.cut.max_tokens
            ids = given[-length:] if form.cut.keeps_end else given[:length]
        self.check(ids, name, gives_tokens=form.gives_tokens)
        return ids

    def encoded(
        self,
        text: str,
        form: PromptForm,
        name: str,
        *,
        param: str | None = None,
        suffix: str = "",
    ) -> list[int]:
        """Like `token_ids`, also for a text that is somewhat too long for the model."""
        tokenizer = self.tokenizer_for(param or parameter_of(name))
        with_special = form.with_special
        if form.cut is not None:
            return tokenizer.encode_cut(
                text,
                form.cut.max_tokens,
                with_special=with_special,
                keeps_end=form.cut.keeps_end,
            )
        self._reject_too_long(text, name, param)
        if suffix:
            self._reject_too_long(suffix, "suffix")
            return infilling_prompt(tokenizer, text, suffix, with_special=with_special)
        return tokenizer.encode(text) if with_special else tokenizer.encode_rendered(text)

    def pairs(
        self, pairs: Iterable[tuple[Text, Text]], cut: PromptCut | None
    ) -> Iterator[list[int]]:
        """A prompt without output of each pair, as the tokenizer joins texts. The second text is
        truncated."""
        last, first = None, Encoding()
        for one, other in pairs:
            tokenizer = self.tokenizer_for(parameter_of(other.name))
            if one is not last:
                self._reject_too_long(one.text, one.name)
                last, first = one, tokenizer.part(one.text)
            if cut is None:
                self._reject_too_long(other.text, other.name)
                second = tokenizer.part(other.text)
            else:
                room = cut.max_tokens - len(first) - tokenizer.num_pair_tokens
                if room < 1:
                    raise PromptTooLong(
                        f"{one.name} has {len(first)} tokens, which leaves none of "
                        f"{cut.max_tokens} for {other.name}; shorten it",
                        param=parameter_of(one.name),
                        num_tokens=len(first),
                        maximum=cut.max_tokens - tokenizer.num_pair_tokens - 1,
                    )
                second = tokenizer.part(other.text, room, keeps_end=cut.keeps_end)
            ids = tokenizer.join(first, second)
            self.check(ids, name_of_pair(one, other), gives_tokens=False)
            yield ids

    def check(
        self,
        token_ids: Sequence[int],
        name: str,
        *,
        param: str | None = None,
        gives_tokens: bool = True,
    ) -> None:
        """The model can compute this prompt."""
        param = param or parameter_of(name)
        if not token_ids:
            what = "continue" if gives_tokens else "compute"
            raise invalid(f"{name} has no tokens; there is nothing to {what}", param=param)
        if len(token_ids) + gives_tokens > self.max_model_len:
            also = ", including at least one output token" * gives_tokens
            raise PromptTooLong(  # clients recognize this error by `maximum context length`
                f"{name} has {len(token_ids)} tokens; this model's maximum context length is "
                f"{self.max_model_len} tokens{also}. Shorten it, or set truncate_prompt_tokens",
                param=param,
                num_tokens=len(token_ids),
                maximum=self.max_model_len - gives_tokens,
            )
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise invalid(
                    f"{name} has token id {token_id}, outside the vocabulary (0 to "
                    f"{self.vocab_size - 1})",
                    param=param,
                )

    def _reject_too_long(self, text: str, name: str, param: str | None = None) -> None:
        """Count slice by slice: tokenizing megabytes as a whole takes seconds and a hundred times
        their memory."""
        if len(text) <= SLICE_CHARACTERS:
            return
        param = param or parameter_of(name)
        tokenizer, num_tokens = self.tokenizer_for(param), 0
        for start in range(0, len(text), SLICE_CHARACTERS):
            part = text[start : start + SLICE_CHARACTERS]
            num_tokens += max(0, len(tokenizer.encode_rendered(part)) - MAX_TOKENS_PER_CUT)
            if num_tokens >= self.max_model_len:
                raise PromptTooLong(
                    f"{name} has at least {num_tokens} tokens; this model's maximum context "
                    f"length is {self.max_model_len} tokens, prompt and output together",
                    param=param,
                    num_tokens=num_tokens,
                    maximum=self.max_model_len - 1,
                )


def named_texts(given: str | Sequence[str], name: str) -> list[Text]:
    """Raises RequestError for empty ones."""
    if isinstance(given, str):
        texts = [Text(given, name)]
    else:
        texts = [Text(text, f"{name}[{index}]") for index, text in enumerate(given)]
    for text in texts:
        if not text.text:
            raise empty(text.name)
    return texts


def text_pairs(
    first: str | Sequence[str], second: str | Sequence[str], names: tuple[str, str]
) -> list[tuple[Text, Text]]:
    """One text with each of the others, or as many of each. Raises RequestError."""
    ones, others = map(named_texts, (first, second), names)
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise invalid(
            f"{names[0]} has {len(ones)} texts and {names[1]} has {len(others)}; pass one text as "
            f"{names[0]}, or as many as {names[1]}",
            param=names[1],
        )
    return list(zip(ones, others, strict=True))


def empty(name: str) -> RequestError:
    return invalid(f"{name} is empty; there is nothing to compute", param=parameter_of(name))


def parameter_of(name: str) -> str:
    """The parameter of what messages call `input[3]`."""
    return re.split(r"\W", name, maxsplit=1)[0]


def name_of_pair(one: Text, other: Text) -> str:
    return f"{other.name} with {one.name}"


def truncates_nothing() -> RequestError:
    return invalid(
        "truncation_side has no effect without truncate_prompt_tokens; remove it",
        param="truncation_side",
    )
