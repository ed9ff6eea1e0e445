"""The checksum of a block is now in `longshore.connectors.base.checksum`."""

from longshore.protocol.moved import moved_names

__getattr__ = moved_names(__name__)
