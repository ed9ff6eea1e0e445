"""The files of stored responses, as a gateway knows them, and which of them have to go."""

from collections.abc import Iterator


class StoredFiles:
    """Names and sizes of files by owner, oldest first. Without I/O."""

    def __init__(self) -> None:
        self._by_owner: dict[str, dict[str, int]] = {}
        self._owner_bytes: dict[str, int] = {}
        self._num_files = 0
        self._num_bytes = 0

    def add(self, owner: str, name: str, size_bytes: int) -> None:
        """The newest file, which can replace a former one of this name."""
        self.discard(owner, name)
        self._by_owner.setdefault(owner, {})[name] = size_bytes
        self._owner_bytes[owner] = self._owner_bytes.get(owner, 0) + size_bytes
        self._num_files += 1
        self._num_bytes += size_bytes

    def discard(self, owner: str, name: str) -> None:
        files = self._by_owner.get(owner, {})
        size_bytes = files.pop(name, None)
        if size_bytes is None:
            return
        self._owner_bytes[owner] -= size_bytes
        self._num_files -= 1
        self._num_bytes -= size_bytes
        if not files:
            del self._by_owner[owner], self._owner_bytes[owner]

    def beyond(self, *, max_files: int, max_bytes: int) -> Iterator[str]:
        """Discard files beyond these limits, and yield their names: the oldest of the owner that
        has most."""
        while self._num_files > max_files or self._num_bytes > max_bytes:
            if self._num_files > max_files:
                owner = max(self._by_owner, key=lambda each: len(self._by_owner[each]))
            else:
                owner = max(self._owner_bytes, key=self._owner_bytes.__getitem__)
            name = next(iter(self._by_owner[owner]))
            self.discard(owner, name)
            yield name
