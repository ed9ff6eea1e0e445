"""A process that splits texts with a tokenizer whose cost is not known, and can be killed.

A thread cannot be killed, and a regex of a model folder may run for hours or need all memory. So
may loading it. The process has limits on its memory and on the time for one call; one that exceeds
them is killed, and the next call starts another one. It ends with its parent.

python -P -m longshore.deploy.gateway.text.tokenizer_process TOKENIZER_FILE, with a socket as
standard input.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
from tokenizers import Encoding, Tokenizer

from longshore.protocol.errors import ConfigError, LongshoreError, shortened

START_TIMEOUT_S: Final = 60.0
DEADLINE_S: Final = 10.0
"""Of one call, and of the wait for the calls before it."""

MAX_MEMORY_BYTES: Final = 4 << 30
MAX_MESSAGE_BYTES: Final = 64 << 20

_MODULE: Final = "longshore.deploy.gateway.text.tokenizer_process"
_PR_SET_PDEATHSIG: Final = 1
_LENGTH_BYTES: Final = 8
# A tokenizer that fails at these, or takes too long, fails at most texts.
_PROBES: Final = (
    "The quick brown fox, it's 12345 years old.\n\n\t  def main():\n    return x == 1\n",
    "".join(map(chr, range(32, 127))) + "äöüßéñ 日本語 한국어 العربية 🙂",
    " " * 256 + "\n" * 64 + "a" * 256 + "!" * 64 + "0" * 256,
)


class TextRejected(LongshoreError):
    """The tokenizer cannot split a text: it fails, or takes too much time or memory."""


class Encoder(Protocol):
    """Splits texts. Raises TextRejected."""

    def ids(self, texts: Sequence[str], *, with_special: bool) -> list[list[int]]: ...

    def encodings(self, texts: Sequence[str], *, with_offsets: bool = False) -> list[Encoding]:
        """Encode without special tokens; each with the offsets of its tokens in the text."""


class LocalEncoder:
    """Splits in this process. Methods for batches release the interpreter lock; others do not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def ids(self, texts: Sequence[str], *, with_special: bool) -> list[list[int]]:
        try:
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=with_special)
        except BaseException as error:
            raise _rejected(error) from error
        return [encoding.ids for encoding in found]

    def encodings(self, texts: Sequence[str], *, with_offsets: bool = False) -> list[Encoding]:
        # The fast variant has no offsets.
        library = self._tokenizer
        encode = library.encode_batch if with_offsets else library.encode_batch_fast
        try:
            return encode(texts, add_special_tokens=False)
        except BaseException as error:
            raise _rejected(error) from error


def is_panic(error: BaseException) -> bool:
    """Whether this is a panic of a library in Rust, which is no Exception."""
    return type(error).__name__ == "PanicException"


def _rejected(error: BaseException) -> BaseException:
    if isinstance(error, Exception) or is_panic(error):
        return TextRejected(f"the model's tokenizer fails: {shortened(_one_line(error))}")
    return error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


class _Encode(msgspec.Struct, tag="encode", frozen=True):
    texts: Sequence[str]
    with_special: bool


class _Describe(msgspec.Struct, tag="describe", frozen=True):
    texts: Sequence[str]
    with_offsets: bool


class _Answer(msgspec.Struct, frozen=True):
    """parts: ids as int32, or an encoding, of each text. error: why there are none."""

    parts: Sequence[bytes] = ()
    error: str | None = None


class IsolatedEncoder:
    """Splits in a process of its own, one call after the other. Thread-safe; calls block.

    Raises ConfigError if the tokenizer cannot be loaded, or fails at common texts.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        self._file = tokenizer_file
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        try:
            self._start()
            for probe in _PROBES:
                self.ids([probe], with_special=True)
                self.encodings([probe])
        except TextRejected as error:
            self.close()
            raise ConfigError(f"{tokenizer_file} cannot be used as a tokenizer: {error}") from error

    def ids(self, texts: Sequence[str], *, with_special: bool) -> list[list[int]]:
        parts = self._ask(_Encode(texts, with_special))
        return [array("i", part).tolist() for part in parts]

    def encodings(self, texts: Sequence[str], *, with_offsets: bool = False) -> list[Encoding]:
        found = []
        for part in self._ask(_Describe(texts, with_offsets)):
            encoding = Encoding()
            encoding.__setstate__(part)
            found.append(encoding)
        return found

    def close(self) -> None:
        """End the process, and wait for its end."""
        if self._process is not None and self._socket is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None

    def __del__(self) -> None:
        self.close()

    def _ask(self, request: _Encode | _Describe) -> Sequence[bytes]:
        if not self._lock.acquire(timeout=DEADLINE_S):
            raise TextRejected("the model's tokenizer is busy with other texts; retry later")
        try:
            if self._socket is None:
                self._start()
            return self._exchange(msgspec.msgpack.encode(request), DEADLINE_S)
        finally:
            self._lock.release()

    def _start(self) -> None:
        self._socket, child_end = socket.socketpair()
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(self._file)],
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # panics write there
                env={**os.environ, "RAYON_NUM_THREADS": "1"},
            )
        self._exchange(b"", START_TIMEOUT_S)

    def _exchange(self, request: bytes, timeout_s: float) -> Sequence[bytes]:
        assert self._socket is not None
        deadline_s = time.monotonic() + timeout_s
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(len(request).to_bytes(_LENGTH_BYTES, "little") + request)
            answer = msgspec.msgpack.decode(_receive(self._socket, deadline_s), type=_Answer)
        except TimeoutError:
            self.close()
            raise TextRejected(
                f"the model's tokenizer took longer than {timeout_s:g} s; send less text, or use "
                "another tokenizer.json"
            ) from None
        except (OSError, EOFError):
            self.close()
            raise TextRejected(
                "the process of the model's tokenizer has died; it probably needed more than "
                f"{MAX_MEMORY_BYTES >> 30} GiB of memory"
            ) from None
        if answer.error is not None:
            raise TextRejected(answer.error)
        return answer.parts


def _receive(connection: socket.socket, deadline_s: float | None) -> bytes:
    """The next message. Raises EOFError, OSError, or TimeoutError after the deadline."""

    def exactly(size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            if deadline_s is not None:
                connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            num_read = connection.recv_into(view)
            if not num_read:
                raise EOFError
            view = view[num_read:]
        return bytes(data)

    return exactly(int.from_bytes(exactly(_LENGTH_BYTES), "little"))


def _answer(tokenizer: Tokenizer, request: _Encode | _Describe) -> _Answer:
    match request:
        case _Encode(texts, with_special):
            found = tokenizer.encode_batch_fast(texts, add_special_tokens=with_special)
            parts = [array("i", encoding.ids).tobytes() for encoding in found]
        case _Describe(texts, with_offsets):
            encode = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
            parts = [each.__getstate__() for each in encode(texts, add_special_tokens=False)]
    if sum(map(len, parts)) > MAX_MESSAGE_BYTES:
        return _Answer(error="the model's tokenizer makes too many tokens of this text")
    return _Answer(parts)


def main() -> None:
    """Answer until the parent closes its end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    decoder = msgspec.msgpack.Decoder(_Encode | _Describe)
    tokenizer: Tokenizer | None = None
    with contextlib.suppress(EOFError, OSError), socket.socket(fileno=0) as connection:
        while True:
            message = _receive(connection, None)
            try:
                if tokenizer is None:
                    tokenizer = Tokenizer.from_file(sys.argv[1])
                    tokenizer.no_truncation()
                    tokenizer.no_padding()
                    answer = _Answer()
                else:
                    answer = _answer(tokenizer, decoder.decode(message))
            except BaseException as error:  # a panic is no Exception
                line = shortened(_one_line(error))
                answer = _Answer(error=f"the model's tokenizer fails: {line}")
            encoded = msgspec.msgpack.encode(answer)
            connection.sendall(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)


if __name__ == "__main__":
    main()
