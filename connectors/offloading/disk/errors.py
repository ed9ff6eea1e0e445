"""Errors of the disk tier's storage. Failed reads and writes of blocks are outcomes, not errors."""

from longshore.protocol.errors import LongshoreError


class DiskStoreError(LongshoreError):
    """The store cannot be opened, listed or removed; the message names the path and the reason."""


class StoreInUse(DiskStoreError):
    """Another process has opened this store for writing; the message names that process."""
