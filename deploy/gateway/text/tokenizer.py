"""A model folder's tokenizer: encodes and decodes text, and holds the chat template."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Encoding, Tokenizer
from tokenizers.decoders import ByteLevel

from longshore.deploy.gateway.text.chat_template import PLAIN_TEMPLATE, ChatTemplate
from longshore.deploy.gateway.text.tokenizer_bounds import read_tokenizer_spec, unknown_cost
from longshore.deploy.gateway.text.tokenizer_process import (
    Encoder,
    IsolatedEncoder,
    LocalEncoder,
    is_panic,
)
from longshore.deploy.model.json_file import read_text
from longshore.deploy.model.text_files import (
    DEFAULT,
    TOOL_USE,
    TextFiles,
    read_template_file,
    read_text_files,
)
from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.model_files import exists
from longshore.scheduler.process.structured_output.vocabulary import bytes_of_tokens

logger = logging.getLogger(__name__)

# Longer text is tokenized on another thread, so that streams do not wait for it.
MAX_INLINE_CHARACTERS: Final = 4096
MAX_INLINE_TEXTS: Final = 16  # likewise for many short ones, which take 50 us each
MAX_INLINE_TOKENS: Final = 256  # likewise for decoding
SLICE_CHARACTERS: Final = 16_384  # of a text whose number of tokens is estimated
# Tokens that a cut may add to a text: it may split tokens of the whole text.
MAX_TOKENS_PER_CUT: Final = 64


class ModelTokenizer:
    """tokenizer.json of a model folder. Thread-safe: the library keeps no state between calls, and
    entries of the cache here never change.

    keeps_end: truncation removes the beginning of a text.
    num_ids: number of token ids, including added tokens.
    added_tokens: ids of the tokens added to the vocabulary, including special tokens.
    is_bytewise: see TokenDecoder.
    max_inline_characters: longer texts are encoded on a thread. encoder: None: the tokenizer's own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        *,
        keeps_end: bool = False,
        encoder: Encoder | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._encoder = LocalEncoder(tokenizer) if encoder is None else encoder
        self.max_inline_characters = MAX_INLINE_CHARACTERS if encoder is None else -1
        self.chat_template = chat_template
        self.keeps_end = keeps_end
        added = tokenizer.get_added_tokens_decoder().items()
        self.added_tokens = {token.content: token_id for token_id, token in added}
        self.special_token_ids = frozenset(token_id for token_id, token in added if token.special)
        self.is_bytewise = isinstance(tokenizer.decoder, ByteLevel)
        decoder = tokenizer.decoder
        self._to_bytes = bytes_of_tokens(decoder and json.loads(decoder.__getstate__()))
        added_ids = self.added_tokens.values()
        self.num_ids = max([tokenizer.get_vocab_size(), *(i + 1 for i in added_ids)])
        self._texts: dict[int, str] = {}  # cache of single tokens' texts

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that is no added one, which may be part of a character; None: they
        are unknown."""
        text = self._tokenizer.id_to_token(token_id)
        return None if text is None or self._to_bytes is None else self._to_bytes(text)

    def encode(self, text: str) -> list[int]:
        """Encode a plain prompt, with the special tokens that the model's text begins with."""
        return self._encoder.ids([text], with_special=True)[0]

    def encode_rendered(self, text: str) -> list[int]:
        """Encode a rendered chat: the template has added the special tokens already."""
        return self._encoder.ids([text], with_special=False)[0]

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without special tokens."""
        return self._encoder.ids(texts, with_special=False)

    def close(self) -> None:
        """End the process that encodes, if there is one."""
        if isinstance(self._encoder, IsolatedEncoder):
            self._encoder.close()

    def encode_cut(
        self, text: str, max_tokens: int, *, with_special: bool, keeps_end: bool | None = None
    ) -> list[int]:
        """Encode and truncate to `max_tokens`, including special tokens, which are kept. The end
        of the text is removed, or its beginning if `keeps_end`; None: as the tokenizer is
        configured. Only the part of a text that may be kept is encoded, because tokens need a
        hundred times the memory of their text."""
        num_special = self._tokenizer.num_special_tokens_to_add(False) if with_special else 0
        encoding = self.part(text, max(0, max_tokens - num_special), keeps_end=keeps_end)
        return self._tokenizer.post_process(encoding, add_special_tokens=with_special).ids[
            :max_tokens
        ]

    def part(
        self, text: str, max_tokens: int | None = None, *, keeps_end: bool | None = None
    ) -> Encoding:
        """One text of a pair, without special tokens, truncated as by `encode_cut`."""
        if max_tokens is None:
            return self._encoder.encodings([text])[0]
        keeps_end = self.keeps_end if keeps_end is None else keeps_end
        part = self._part_of(text, max_tokens, keeps_end=keeps_end)
        (encoding,) = self._encoder.encodings([part])
        encoding.truncate(max_tokens, direction="left" if keeps_end else "right")
        return encoding

    @property
    def num_pair_tokens(self) -> int:
        """Special tokens that `join` adds."""
        return self._tokenizer.num_special_tokens_to_add(True)

    def join(self, first: Encoding, second: Encoding) -> list[int]:
        """Two texts as one prompt, with the special tokens that the model expects of a pair."""
        return self._tokenizer.post_process(first, second, add_special_tokens=True).ids

    def cut(self, text: str, max_tokens: int, *, keeps_end: bool | None = None) -> str:
        """The text of as many tokens, truncated as by `encode_cut`."""
        keeps_end = self.keeps_end if keeps_end is None else keeps_end
        part = self._part_of(text, max_tokens, keeps_end=keeps_end)
        (encoding,) = self._encoder.encodings([part], with_offsets=True)
        if len(encoding) <= max_tokens and len(part) == len(text):
            return text
        encoding.truncate(max_tokens, direction="left" if keeps_end else "right")
        return part[encoding.offsets[0][0] : encoding.offsets[-1][1]]

    def _part_of(self, text: str, num_tokens: int, *, keeps_end: bool) -> str:
        """The slices of the text, from the end that is kept, that hold at least `num_tokens`."""
        for num_slices in range(1, -(-len(text) // SLICE_CHARACTERS)):
            stop = num_slices * SLICE_CHARACTERS
            start = stop - SLICE_CHARACTERS
            piece = text[-stop : len(text) - start] if keeps_end else text[start:stop]
            num_tokens -= len(self.encode_rendered(piece)) - MAX_TOKENS_PER_CUT
            if num_tokens <= 0:
                return text[-stop:] if keeps_end else text[:stop]
        return text

    def entries(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's entry of each id, which may encode spaces and bytes by other letters."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids. Those outside the vocabulary have no text."""
        if len(token_ids) > MAX_INLINE_TOKENS:
            return self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)[0]
        if len(token_ids) != 1:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        (token_id,) = token_ids
        if (text := self._texts.get(token_id)) is None:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
            if token_id < self.num_ids:  # the number of unknown ids is unbounded
                self._texts[token_id] = text
        return text


def load_tokenizer(
    model_dir: Path,
    tokenizer_file: Path | None = None,
    *,
    chat_template_file: Path | None = None,
    advice_level: int = logging.WARNING,
) -> ModelTokenizer | None:
    """The folder's tokenizer; None if it has none, so that only token ids can be served.

    tokenizer_file: see ModelFolder; None: tokenizer.json of the folder, if there is one.
    advice_level: level of the log lines about a missing tokenizer or chat template.
    Raises ConfigError if a file exists and cannot be read.
    """
    tokenizer_file = tokenizer_file or model_dir / "tokenizer.json"
    if not exists(tokenizer_file):
        logger.log(
            advice_level,
            "%s has no tokenizer: prompts must be token ids",
            model_dir,
        )
        return None
    tokenizer, encoder = _load(tokenizer_file)
    files = read_text_files(model_dir, tokenizer_file)
    templates = _templates(files, chat_template_file)
    if DEFAULT not in templates:
        logger.log(
            advice_level,
            "%s has no chat template: chats are rendered as lines of `role: content`. "
            "Set a template with --chat-template FILE.",
            model_dir,
        )
    return ModelTokenizer(
        tokenizer,
        _compiled(templates, files),
        keeps_end=files.keeps_end,
        encoder=encoder,
    )


def _templates(files: TextFiles, chat_template_file: Path | None) -> Mapping[str, str]:
    """The sources of the templates by name. chat_template_file: the user's, for all chats."""
    if chat_template_file is not None:
        return {DEFAULT: read_template_file(chat_template_file)}
    return files.templates


def _compiled(templates: Mapping[str, str], files: TextFiles) -> ChatTemplate:
    return ChatTemplate(
        templates.get(DEFAULT, PLAIN_TEMPLATE),
        files.special_tokens,
        tool_use=templates.get(TOOL_USE),
    )


def _load(file: Path, advice_level: int = logging.WARNING) -> tuple[Tokenizer, Encoder | None]:
    """The tokenizer, and a process that encodes if the cost of that is not known. Then the
    tokenizer here has no parts of unknown cost, and only decodes."""
    reason = unknown_cost(read_tokenizer_spec(file))
    try:
        if reason is None:
            return Tokenizer.from_file(str(file)), None
        encoder = IsolatedEncoder(file)
        spec = json.loads(read_text(file)) | {"normalizer": None, "pre_tokenizer": None}
        tokenizer = Tokenizer.from_str(json.dumps(spec))
    except ConfigError:
        raise
    except BaseException as error:  # the library raises bare Exception, or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        line = shortened(" ".join(str(error).split()))
        raise ConfigError(f"{file} cannot be read as a tokenizer: {line}") from error
    logger.log(
        advice_level,
        "%s has %s, whose cost is not known: texts are split in a process of its own, which is "
        "somewhat slower and is killed if it takes too long",
        file,
        reason,
    )
    return tokenizer, encoder


def check_text_files(
    model_dir: Path, tokenizer_file: Path | None, chat_template_file: Path | None
) -> None:
    """Raise ConfigError if the tokenizer or the chat template cannot be used, before a process is
    started. The files are those of `load_tokenizer`."""
    tokenizer_file = tokenizer_file or model_dir / "tokenizer.json"
    if exists(tokenizer_file):
        _, encoder = _load(tokenizer_file, logging.DEBUG)
        if isinstance(encoder, IsolatedEncoder):
            encoder.close()
    files = read_text_files(model_dir, tokenizer_file)
    _compiled(_templates(files, chat_template_file), files)
