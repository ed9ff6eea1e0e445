"""The checksum of a block depends on all that it covers."""

from longshore.connectors.base.checksum import block_checksum
from tests.connectors.offloading.disk.stores import IDENTITY, SLOT_BYTES, content, key


def test_a_checksum_covers_identity_key_and_every_byte() -> None:
    data = content(key(0)).copy()
    digest = IDENTITY.rank_digest(0)
    whole = block_checksum(data, digest, key(0))
    assert whole == block_checksum(data.tobytes(), digest, key(0)) < 2**64
    others = {
        block_checksum(data, IDENTITY.rank_digest(1), key(0)),
        block_checksum(data, digest, key(1)),
        block_checksum(data[:-1], digest, key(0)),
    }
    for position in range(0, SLOT_BYTES, 97):
        data[position] ^= 1
        others.add(block_checksum(data, digest, key(0)))
        data[position] ^= 1
    assert whole not in others
    assert len(others) == 3 + len(range(0, SLOT_BYTES, 97))
