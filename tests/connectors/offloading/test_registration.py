"""Registration of the host tier in chunks, with a runtime that has a limit."""

import logging

import pytest

from longshore.connectors.offloading import registration as module
from longshore.connectors.offloading.registration import RegisteredMemory
from longshore.protocol.errors import ConfigError
from tests.connectors.offloading.cuda_runtime import Library


@pytest.mark.req("WRK-02")
def test_memory_is_registered_in_chunks_until_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "LONG_REGISTRATION_S", -1)
    library = Library()
    memory = RegisteredMemory(library, 4096, 10_000, chunk_bytes=4096)
    assert library.registered == {4096: 4096, 8192: 4096, 12_288: 10_000 - 8192}
    shown = [record.getMessage() for record in caplog.records]
    assert shown[:3] == [
        f"host tier: {share} % of its memory is registered" for share in (40, 81, 100)
    ]
    memory.close()
    memory.close()
    assert not library.registered


def test_a_limit_names_what_to_lower_and_leaves_nothing_registered() -> None:
    library = Library(limit=9000)
    with pytest.raises(ConfigError, match=r"only 8192 of the 10000 bytes.*Lower cpu_bytes_to_use"):
        RegisteredMemory(library, 4096, 10_000, chunk_bytes=4096)
    assert not library.registered
    assert library.last_error == 0, "torch would report it for its next kernel"


def test_a_chunk_that_cannot_be_unregistered_does_not_keep_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    library = Library()
    memory = RegisteredMemory(library, 4096, 10_000, chunk_bytes=4096)
    del library.registered[8192]
    memory.close()
    assert not library.registered
    assert "could not be unregistered: the CUDA runtime reported error 713" in caplog.text
