"""The directory of what outlives a deployment: the seed of its block hashes, and the secret of its
engines' transfers.

KV that a tier has stored is found by block hash, so a restarted deployment must have the same seed.
Whoever knows the seed can guess block hashes, so only the owner may read it.
"""

import hashlib
import logging
import os
import secrets
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from longshore.deploy.supervisor.home_dir import can_create, temporary_home
from longshore.protocol.errors import ConfigError
from longshore.protocol.private_files import check_private, read_private
from longshore.protocol.transport.security import new_secret

logger = logging.getLogger(__name__)

HASH_SEED_BYTES: Final = 32
_SEED_FILE: Final = "block_hash_seed"
_MAX_SEED_FILE_BYTES: Final = 4096
_TRANSFER_SECRET_FILE: Final = "transfer_secret"
_OTHER_DIR: Final = "Set state_dir (--state-dir) to a directory that you own and can write to."


def default_state_dir() -> Path:
    """`longshore` in the user's state directory (XDG), or `temporary_home()` if it cannot be
    written to."""
    state_home = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state_home.is_absolute():  # as the XDG specification says
        state_home = Path(os.path.expanduser("~/.local/state"))  # stays relative without a home
    path = state_home / "longshore"
    return path if path.is_absolute() and can_create(path) else temporary_home()


@cache
def _warn_of_temporary(path: Path) -> None:
    """Once per process, although several of its parts use the directory."""
    logger.warning(
        "uid %d has no home directory that it can write to (HOME=%s): %s is the state directory. "
        "What it keeps, such as the seed that finds stored KV blocks again, is lost with the "
        "container. To keep it, set --state-dir to a directory on a volume",
        os.geteuid(),
        os.environ.get("HOME", ""),
        path,
    )


class StateDir:
    """A directory that only its owner can use."""

    def __init__(self, path: Path | str | None = None) -> None:
        """Creates the directory if it is missing. path: None is the default.

        Raises ConfigError if it cannot be created, or if other users can use it.
        """
        self.path = default_state_dir() if path is None else Path(path)
        if path is None and self.path == temporary_home():
            _warn_of_temporary(self.path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the state directory {self.path} cannot be created ({error.strerror}). "
                f"{_OTHER_DIR}"
            ) from error
        check_private(self.path)

    def block_hash_seed(self) -> bytes:
        """The seed of block hashes, created at the first call. Deployments that start at the same
        time get the same one. Raises ConfigError if it cannot be created or is damaged."""
        path = self.path / _SEED_FILE
        try:
            if not path.exists():
                self._create(path, secrets.token_hex(HASH_SEED_BYTES) + "\n")
            return read_block_hash_seed(path)
        except OSError as error:
            raise ConfigError(
                f"the block hash seed {path} cannot be created or read ({error.strerror}). "
                f"{_OTHER_DIR}"
            ) from error

    def transfer_secret_file(self) -> Path:
        """A file with the secret that engines must know to pull KV from each other, created at the
        first call. Raises ConfigError if it cannot be created."""
        path = self.path.absolute() / _TRANSFER_SECRET_FILE
        try:
            if not path.exists():
                self._create(path, new_secret() + "\n")
            check_private(path)
        except OSError as error:
            raise ConfigError(
                f"the secret of transfers {path} cannot be created ({error.strerror}). {_OTHER_DIR}"
            ) from error
        return path

    def _create(self, path: Path, text: str) -> None:
        """Write a file whole or not at all, unless another process has created it meanwhile."""
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=self.path)  # 0600
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            try:
                os.link(name, path)
            except FileExistsError:
                return
        finally:
            os.unlink(name)
        directory = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def reasoning_key(hash_seed: bytes) -> bytes:
    """The key of gateways for reasoning that clients keep. Derived from the seed, which all nodes
    have, and of which it tells nothing."""
    return hashlib.blake2b(b"reasoning of clients", key=hash_seed, digest_size=32).digest()


def read_block_hash_seed(path: Path) -> bytes:
    """The seed in a private file. Raises ConfigError if other users can read it or it is damaged,
    OSError if it cannot be read."""
    content = read_private(path, _MAX_SEED_FILE_BYTES)
    try:
        text = content.decode("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    if len(text) == 2 * HASH_SEED_BYTES:
        try:
            return bytes.fromhex(text)
        except ValueError:
            pass
    raise ConfigError(
        f"the block hash seed {path} is damaged: it does not have {2 * HASH_SEED_BYTES} "
        "hexadecimal digits. Restore the file from a backup, or delete it to get a new seed, "
        "with which no KV that is stored already can be found."
    )
