"""Requests to a speech model: audio features, decoder prompts and suppressed tokens.

Whisper's prompt is `<|startofprev|>` and the previous text, if any, then `<|startoftranscript|>`,
language, task and `<|notimestamps|>`. An English-only model has neither language nor task.
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
# Puts every language above all other tokens: logits of a model differ by less.
_LANGUAGE_BIAS: Final = 100.0
NUM_PRIMED: Final = 1
"""Tokens at a prompt's end that are sent as output, so that tokens that must not begin the answer
can be expressed as bad words after them."""

DETECTION: Final = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class BadSpeechRequest(ValueError):
    """An invalid request to a speech model; `param` is the invalid argument."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class SpeechTokenizer:
    """Decodes answers, without timestamps."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        timestamps = (i for name, i in tokenizer.added_tokens.items() if _TIMESTAMP.fullmatch(name))
        self.special_token_ids = tokenizer.special_token_ids.union(timestamps)
        self.is_bytewise = tokenizer.is_bytewise
        self.decode = tokenizer.decode


class SpeechModel:
    """Creates requests for the speech model of one folder.

    languages: token ids by language code, such as `en`; empty for an English-only model.
    tokenizer: decodes the answers.
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
        """Raises ConfigError naming what is missing in the folder."""
        if tokenizer is None:
            raise ConfigError(
                f"{folder} has no tokenizer.json, which has the special tokens that a speech model "
                "needs"
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
            raise ConfigError(f"{file} is not in Whisper's format: {error}") from error
        if self.languages:
            names = map(_task_token, TASKS)
            tokens |= {name: _token(tokenizer, name, folder, vocab_size) for name in names}
        self._tokens = tokens

    def _suppressed(
        self, settings: Mapping[str, Any], last_of_prompt: int
    ) -> tuple[tuple[int, ...], ...]:
        """As bad words: tokens that are always suppressed, and those suppressed at the start."""
        always, first = (
            [i for i in settings.get(name) or () if 0 <= i < self._vocab_size]
            for name in ("suppress_tokens", "begin_suppress_tokens")
        )
        words = [(i,) for i in always] + [(last_of_prompt, i) for i in first]
        if len(words) > MAX_BAD_WORDS:
            raise ConfigError(
                f"generation_config.json: suppress_tokens and begin_suppress_tokens have "
                f"{len(words)} ids; at most {MAX_BAD_WORDS} are supported"
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

    def language(self, given: str | None, task: str) -> str | None:
        """The code of the spoken language. None: it must be detected, or there is only one.

        Raises BadSpeechRequest for a language or task that the model does not support.
        """
        if task not in TASKS:
            raise BadSpeechRequest("task", f"task={task!r} is unknown; use {' or '.join(TASKS)}")
        code = None if given is None else given.lower()
        if not self.languages:
            if task != "transcribe":
                raise BadSpeechRequest(
                    "model", "this model only transcribes English; it cannot translate"
                )
            if code not in (None, ONLY_LANGUAGE):
                raise BadSpeechRequest(
                    "language", f"language={given!r}: this model only supports English"
                )
            return None
        if code is None:
            return self._default_language
        if code not in self.languages:
            raise BadSpeechRequest(
                "language",
                f"language={given!r} is not supported by this model; use one of "
                f"{', '.join(sorted(self.languages))}",
            )
        return code

    def must_detect(self, language: str | None) -> bool:
        """language: the result of `language`."""
        return language is None and bool(self.languages)

    def detection(self) -> tuple[list[int], SamplingParams]:
        """Prompt and settings of the request whose single output token is the language."""
        bias = dict.fromkeys(self.languages.values(), _LANGUAGE_BIAS)
        return [self._tokens[START]], msgspec.structs.replace(DETECTION, logit_bias=bias)

    def detected(self, token_ids: Sequence[int]) -> str:
        """The language in the answer to `detection`. Raises BadSpeechRequest if there is none."""
        for code, token_id in self.languages.items():
            if list(token_ids) == [token_id]:
                return code
        raise BadSpeechRequest("language", "the language could not be detected; set language")

    def prompt(self, language: str | None, task: str, previous: str | None) -> list[int]:
        """The decoder's prompt. Send its last NUM_PRIMED tokens as output.

        previous: preceding text; only its end is used, less than half of the model's length.
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
            raise BadSpeechRequest("prompt", "prompt has a special token; use plain text")
        max_kept = min(self._max_model_len // 2, self._max_model_len - len(instructions) - 1) - 1
        kept = token_ids[-max_kept:] if max_kept > 0 else []
        return [self._tokens[PREVIOUS], *kept, *instructions]

    def params(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` with the suppressed tokens as bad words, and with limits increased by what is
        sent as output. Raises BadSpeechRequest for unsupported settings."""
        if sampling.prompt_logprobs is not None:
            raise BadSpeechRequest("prompt_logprobs", "prompt_logprobs is not supported for audio")
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
    """The text of a whole audio input: Whisper's words include the space before them."""
    return "".join(texts).strip()


def _task_token(task: str) -> str:
    return f"<|{task}|>"


def _token(tokenizer: ModelTokenizer, name: str, folder: Path, vocab_size: int) -> int:
    token_id = tokenizer.added_tokens.get(name)
    if token_id is None or token_id >= vocab_size:
        raise ConfigError(
            f"{folder / 'tokenizer.json'} has no token {name}, which a speech model needs. Use the "
            "model's own tokenizer."
        )
    return token_id


def _languages(settings: Mapping[str, Any], tokenizer: ModelTokenizer) -> dict[str, int]:
    if settings.get("is_multilingual") is False:
        return {}
    named = settings.get("lang_to_id") or tokenizer.added_tokens
    matches = ((_LANGUAGE.fullmatch(name), token_id) for name, token_id in named.items())
    return {match[1]: token_id for match, token_id in matches if match is not None}


def _default_language(settings: Mapping[str, Any], languages: Mapping[str, int]) -> str | None:
    """The language of a model that was fine-tuned to one; else None."""
    name = str(settings.get("language") or "").lower().strip("<|>")
    if name in languages:
        return name
    forced = dict(settings.get("forced_decoder_ids") or ())
    return next((code for code, token_id in languages.items() if token_id == forced.get(1)), None)
