"""The keys of a node: files that only their owner can read."""

import os
from pathlib import Path
from typing import Final

import msgspec
import zmq

from longshore.deploy.supervisor.state_dir import read_block_hash_seed
from longshore.deploy.topology.file import KeyPaths
from longshore.protocol.errors import ConfigError
from longshore.protocol.private_files import read_private
from longshore.protocol.transport.security import CurveKeys, new_secret

_MAX_FILE_BYTES: Final = 4096
_SECRET_CHARACTERS: Final = 40


def create_node_keys(path: Path) -> str:
    """Write a new pair of keys to a new file; returns the public key."""
    public, secret = zmq.curve_keypair()
    keys = CurveKeys(public.decode(), secret.decode())
    _create(path, msgspec.json.encode(keys) + b"\n")
    return keys.public


def create_transfer_secret(path: Path) -> None:
    """Write a new secret of transfers to a new file."""
    _create(path, new_secret().encode() + b"\n")


def read_node_keys(path: str, public_key: str) -> CurveKeys:
    """The keys of this node. Raises ConfigError if the file is missing, not private, or belongs to
    another public key."""
    content = _read(Path(path), "longshore keys node")
    try:
        keys = msgspec.json.decode(content, type=CurveKeys)
        derived = zmq.curve_public(keys.secret.encode()).decode()
    except (ValueError, msgspec.MsgspecError, zmq.ZMQError) as error:
        raise ConfigError(
            f"{path} is damaged: {error}. Restore it, or delete it, run `longshore keys node`, and "
            "write the new public key into the topology."
        ) from error
    if derived != public_key:
        raise ConfigError(
            f"{path} has the public key {derived}, but the topology has {public_key} for this "
            "node. Write the key of the file into the topology, on all nodes, or use the right "
            "file."
        )
    return CurveKeys(derived, keys.secret)


def check_transfer_secret(path: str) -> None:
    """Raise ConfigError if the file is missing, not private or damaged."""
    content = _read(Path(path), "longshore keys transfer")
    if len(content.strip()) != _SECRET_CHARACTERS:
        raise ConfigError(
            f"{path} is damaged: it must have {_SECRET_CHARACTERS} characters, as `longshore keys "
            "transfer` writes them. Copy the file of another node."
        )


def read_hash_seed(paths: KeyPaths) -> bytes | None:
    """The seed of block hashes; None if it has no file."""
    if paths.block_hash_seed is None:
        return None
    path = Path(paths.block_hash_seed)
    try:
        return read_block_hash_seed(path)
    except OSError as error:
        raise ConfigError(
            f"the block hash seed {path} cannot be read ({error.strerror}). Copy the file of "
            "another node."
        ) from error


def _read(path: Path, command: str) -> bytes:
    try:
        return read_private(path, _MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"the key file {path} cannot be read ({error.strerror}). Run `{command}`, or copy it "
            "to this node."
        ) from error


def _create(path: Path, content: bytes) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be created ({error.strerror}). Choose another file with --output."
        ) from error
