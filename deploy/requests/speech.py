"""What a speech model is asked: audio as features, decoder prompts, and what it must not say.

The prompt of a Whisper is `<|startoftranscript|>`, language, task and `<|notimestamps|>`, with what
was said before between `<|startofprev|>` and that. A model for English alone has neither language
nor task.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.model.folder import AudioInput
from longshore.deploy.model.json_file import read_json_object
from longshore.deploy.requests.audio import Samples
from longshore.protocol.errors import ConfigError
from longshore.protocol.requests import MultimodalFeature
from longshore.protocol.sampling import MAX_BAD_WORDS, SamplingParams

Task: TypeAlias = Literal["transcribe", "translate"]

START: Final = "<|startoftranscript|>"
PREVIOUS: Final = "<|startofprev|>"
NO_TIMESTAMPS: Final = "<|notimestamps|>"
TOKENS: Final = (START, PREVIOUS, NO_TIMESTAMPS)
ONLY_LANGUAGE: Final = "en"
TASKS: Final[tuple[Task, ...]] = ("transcribe", "translate")
_LANGUAGE: Final = re.compile(r"<\|([a-z]{2,3})\|>")
_TIMESTAMP: Final = re.compile(r"<\|\d+\.\d\d\|>")
# Lifts any language above every other token: logits of one model are not so far apart.
_LANGUAGE_BIAS: Final = 100.0
NUM_PRIMED: Final = 1
"""Tokens at a prompt's end that are sent as output, so that what must not begin the answer can be
forbidden behind them."""

DETECTION: Final = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class BadSpeechRequest(ValueError):
    """Something that the model cannot be asked; `param` is the argument at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class SpeechTokenizer:
    """Decodes answers: timestamps are no text."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        timestamps = (i for name, i in tokenizer.added_tokens.items() if _TIMESTAMP.fullmatch(name))
        self.special_token_ids = tokenizer.special_token_ids.union(timestamps)
        self.is_bytewise = tokenizer.is_bytewise
        self.decode = tokenizer.decode


class SpeechModel:
    """One model folder's way of asking.

    languages: ids of their tokens by code, as in `en`; empty if the model knows English alone.
    tokenizer: of the answers.
    """

    def __init__(
        self,
        folder: Path,
        audio: AudioInput,
        tokenizer: ModelTokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        """Raises ConfigError naming what the folder lacks."""
        if tokenizer is None:
            raise ConfigError(
                f"{folder} has no tokenizer.json: its special tokens say what a speech model is to "
                "do"
            )
        self.audio = audio
        self.tokenizer = SpeechTokenizer(tokenizer)
        self._text_tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        file = folder / "generation_config.json"
        settings = read_json_object(file) if file.exists() else {}
        tokens = {name: _token(tokenizer, name, folder, vocab_size) for name in TOKENS}
        try:
            self.languages = _languages(settings, tokenizer)
            self._default_language = _default_language(settings, self.languages)
            self._bad_words = self._suppressed(settings, tokens[NO_TIMESTAMPS])
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file} is not as Whisper's are written: {error}") from error
        if self.languages:
            names = map(_task_token, TASKS)
            tokens |= {name: _token(tokenizer, name, folder, vocab_size) for name in names}
        self._tokens = tokens

    def _suppressed(
        self, settings: Mapping[str, Any], last_of_prompt: int
    ) -> tuple[tuple[int, ...], ...]:
        """As bad words: those for ever, and those that must not begin the answer."""
        ever, first = (
            [i for i in settings.get(name) or () if 0 <= i < self._vocab_size]
            for name in ("suppress_tokens", "begin_suppress_tokens")
        )
        words = [(i,) for i in ever] + [(last_of_prompt, i) for i in first]
        if len(words) > MAX_BAD_WORDS:
            raise ConfigError(
                f"generation_config.json: suppress_tokens and begin_suppress_tokens have "
                f"{len(words)} ids; {MAX_BAD_WORDS} can be suppressed"
            )
        return tuple(words)

    def feature(self, piece: Samples) -> MultimodalFeature:
        """piece: at most `audio.max_samples`, at its rate; the feature is a view of it."""
        data = np.ascontiguousarray(piece, "<f4").view(np.uint8)
        return MultimodalFeature(
            hash=hashlib.sha256(data).hexdigest(),
            offset=0,
            num_tokens=self.audio.num_tokens,
            modality="audio",
            data=data,
        )

    def language(self, asked: str | None, task: str) -> str | None:
        """The code of the language to be heard. None: it has to be detected, or there is but one.

        Raises BadSpeechRequest for a language or task that the model does not know.
        """
        if task not in TASKS:
            raise BadSpeechRequest("task", f"task={task!r} is unknown; use {' or '.join(TASKS)}")
        code = None if asked is None else asked.lower()
        if not self.languages:
            if task != "transcribe":
                raise BadSpeechRequest(
                    "model", "this model transcribes English; it cannot translate"
                )
            if code not in (None, ONLY_LANGUAGE):
                raise BadSpeechRequest(
                    "language", f"language={asked!r}: this model knows English alone"
                )
            return None
        if code is None:
            return self._default_language
        if code not in self.languages:
            raise BadSpeechRequest(
                "language",
                f"language={asked!r} is not known to this model; use the code of one: "
                f"{', '.join(sorted(self.languages))}",
            )
        return code

    def must_detect(self, language: str | None) -> bool:
        """language: what `language` said."""
        return language is None and bool(self.languages)

    def detection(self) -> tuple[list[int], SamplingParams]:
        """Prompt and settings of the request whose one token is that of the language."""
        bias = dict.fromkeys(self.languages.values(), _LANGUAGE_BIAS)
        return [self._tokens[START]], msgspec.structs.replace(DETECTION, logit_bias=bias)

    def detected(self, token_ids: Sequence[int]) -> str:
        """The language that the answer to `detection` names. Raises BadSpeechRequest if none."""
        for code, token_id in self.languages.items():
            if list(token_ids) == [token_id]:
                return code
        raise BadSpeechRequest("language", "the language could not be detected; say which it is")

    def prompt(self, language: str | None, task: str, previous: str | None) -> list[int]:
        """The decoder's prompt. Its last NUM_PRIMED tokens are to be sent as output.

        previous: text that is taken to stand before the audio's; of a long one the end is used,
                  less than half of what fits the model.
        """
        instructions = [self._tokens[START]]
        if language is not None:
            instructions += [self.languages[language], self._tokens[_task_token(task)]]
        instructions.append(self._tokens[NO_TIMESTAMPS])
        if previous is None or not (text := previous.strip()):
            return instructions
        special = self.tokenizer.special_token_ids
        token_ids = self._text_tokenizer.encode_rendered(f" {text}")
        if any(token_id in special for token_id in token_ids):
            raise BadSpeechRequest("prompt", "prompt holds a special token; give plain text")
        room = min(self._max_model_len // 2, self._max_model_len - len(instructions) - 1) - 1
        kept = token_ids[-room:] if room > 0 else []
        return [self._tokens[PREVIOUS], *kept, *instructions]

    def params(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` without the tokens that the model must not say, and with room for what is
        sent as output. Raises BadSpeechRequest if it asks for what is not served here."""
        if sampling.prompt_logprobs is not None:
            raise BadSpeechRequest("prompt_logprobs", "prompt_logprobs are not given for audio")
        words = (*self._bad_words, *sampling.bad_words_token_ids)
        max_tokens = sampling.max_tokens
        try:
            return msgspec.structs.replace(
                sampling,
                bad_words_token_ids=words,
                max_tokens=None if max_tokens is None else max_tokens + NUM_PRIMED,
                min_tokens=sampling.min_tokens and sampling.min_tokens + NUM_PRIMED,
            )
        except ValueError as error:
            raise BadSpeechRequest("bad_words", str(error)) from error


def join_texts(texts: Sequence[str]) -> str:
    """The text of a whole audio: words of a Whisper bring the space before them."""
    return "".join(texts).strip()


def _task_token(task: str) -> str:
    return f"<|{task}|>"


def _token(tokenizer: ModelTokenizer, name: str, folder: Path, vocab_size: int) -> int:
    token_id = tokenizer.added_tokens.get(name)
    if token_id is None or token_id >= vocab_size:
        raise ConfigError(
            f"{folder / 'tokenizer.json'} has no token {name}, which a speech model is asked "
            "with. Take the tokenizer that the model came with."
        )
    return token_id


def _languages(settings: Mapping[str, Any], tokenizer: ModelTokenizer) -> dict[str, int]:
    if settings.get("is_multilingual") is False:
        return {}
    named = settings.get("lang_to_id") or tokenizer.added_tokens
    matches = ((_LANGUAGE.fullmatch(name), token_id) for name, token_id in named.items())
    return {match[1]: token_id for match, token_id in matches if match is not None}


def _default_language(settings: Mapping[str, Any], languages: Mapping[str, int]) -> str | None:
    """What a model that was tuned to one language says of it."""
    name = str(settings.get("language") or "").lower().strip("<|>")
    if name in languages:
        return name
    forced = dict(settings.get("forced_decoder_ids") or ())
    return next((code for code, token_id in languages.items() if token_id == forced.get(1)), None)
