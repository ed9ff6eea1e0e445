"""The identity of a store: everything that must be equal for its bytes to be usable.

Each identity has a subdirectory of its own, named by a digest, with a readable `identity.json`.
"""

import hashlib
import os
from pathlib import Path
from typing import Final

import msgspec

from longshore.connectors.base.checksum import IDENTITY_DIGEST_BYTES
from longshore.protocol.private_files import Folder

FORMAT_VERSION: Final = 1
IDENTITY_FILE: Final = "identity.json"
_MAX_FILE_BYTES: Final = 1 << 20


class StoreIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two deployments with equal identities can read each other's blocks.

    model_name:      only for messages: a renamed model keeps its blocks.
    kv_layout:       order of the dimensions of a block, and its shape.
    hash_seed:       digest of the block hash seed, never the seed itself.
    block_size:      tokens per stored block.
    groups:          digest of the KV cache groups: their layers, kinds and block sizes.
    parallel_layout: the layers and KV heads of each rank, in words.
    """

    model_name: str
    model_fingerprint: str
    kv_layout: str
    dtype: str
    hash_seed: str
    block_size: int
    groups: str
    parallel_layout: str
    num_ranks: int
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """The name of the store's directory: 32 hexadecimal digits."""
        fields = msgspec.structs.asdict(self)
        del fields["model_name"]
        content = msgspec.json.encode(fields, order="sorted")
        return hashlib.sha256(content).hexdigest()[: 2 * IDENTITY_DIGEST_BYTES]

    def rank_digest(self, rank: int) -> bytes:
        """The identity in the checksums of this rank's blocks, in all tiers."""
        return rank_digest(self.digest, rank)


def rank_digest(identity_digest: str, rank: int) -> bytes:
    """As `StoreIdentity.rank_digest`, from the name of the store's directory."""
    content = bytes.fromhex(identity_digest) + rank.to_bytes(4, "little")
    return hashlib.sha256(content).digest()[:IDENTITY_DIGEST_BYTES]


class _IdentityFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """checksum: sha256 of the identity, model name included, as sorted JSON."""

    identity: StoreIdentity
    checksum: str


def read_identity(directory: Path) -> StoreIdentity | None:
    """The identity of the store in `directory`; None if the file is missing or damaged."""
    try:
        with Folder.open(directory) as folder:
            descriptor = folder.open_file(IDENTITY_FILE, os.O_RDONLY)
        with open(descriptor, "rb") as content:
            file = msgspec.json.decode(content.read(_MAX_FILE_BYTES), type=_IdentityFile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    intact = file.checksum == _checksum(file.identity) and file.identity.digest == directory.name
    return file.identity if intact else None


def write_identity(directory: Folder, identity: StoreIdentity) -> None:
    """Write the file in one step, so that a reader sees all of it or nothing."""
    content = msgspec.json.encode(_IdentityFile(identity, _checksum(identity)))
    temporary = f"{IDENTITY_FILE}.{os.getpid()}"
    with open(directory.create_file(temporary), "wb") as file:
        file.write(msgspec.json.format(content) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    directory.replace(temporary, IDENTITY_FILE)


def _checksum(identity: StoreIdentity) -> str:
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()
