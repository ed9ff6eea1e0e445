"""Topologies of two nodes on this host, and their processes."""

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil

from longshore.deploy.admin.actions import SOCKET_NAME, Action, Result
from longshore.deploy.admin.client import perform
from longshore.deploy.topology.file import PORTS_PER_ENGINE
from longshore.deploy.topology.keys import create_node_keys, create_transfer_secret
from tests.integration.deployment import PATIENCE_S, wait_until
from tests.integration.forks import template

ADDRESSES: Final = {"a": "127.0.0.1", "b": "127.0.0.2"}


def free_ports(address: str, count: int) -> int:
    """The first of `count` consecutive free ports."""
    for _ in range(100):
        with ExitStack() as stack:
            first = stack.enter_context(socket.create_server((address, 0))).getsockname()[1]
            try:
                for port in range(first + 1, first + count):
                    stack.enter_context(socket.create_server((address, port)))
            except (OSError, OverflowError):
                continue
            return int(first)
    raise AssertionError("no free ports")


class TwoNodes:
    """A file with one engine and one gateway on each node. urls: of the gateways."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        roles: Sequence[str] = ("unified", "unified"),
        more: str = "",
    ) -> None:
        self.path = folder / "topology.toml"
        self.urls: dict[str, str] = {}
        create_transfer_secret(folder / "transfer.key")
        (folder / "block_hash_seed").touch(mode=0o600)
        (folder / "block_hash_seed").write_text("5" * 64)
        tables = [
            f'model = "{model}"\n[keys]\ntransfer_secret = "{folder}/transfer.key"\n'
            f'block_hash_seed = "{folder}/block_hash_seed"\n'
            "[settings]\nnum_blocks = 600\nmax_num_seqs = 32\nthreads = 1\nhang_timeout_s = 0.0\n"
            f'drain_timeout_s = 5.0\nstate_dir = "{folder}/state"\n{more}'
        ]
        for (name, address), role in zip(ADDRESSES.items(), roles, strict=True):
            public_key = create_node_keys(folder / f"{name}.json")
            first = free_ports(address, PORTS_PER_ENGINE + 1)
            self.urls[name] = f"http://{address}:{first + PORTS_PER_ENGINE}"
            tables += [
                f'[nodes.{name}]\naddress = "{address}"\npublic_key = "{public_key}"\n'
                f'keys = {{node = "{folder}/{name}.json"}}',
                f'[[engines]]\nnode = "{name}"\nrole = "{role}"\nport = {first}',
                f'[[gateways]]\nnode = "{name}"\nhost = "{address}"\n'
                f"port = {first + PORTS_PER_ENGINE}",
            ]
        self.path.write_text("\n".join(tables))


class NodeProcess:
    """`longshore node` of one node. number: of its starts, to keep their outputs apart."""

    def __init__(self, topology: TwoNodes, name: str, number: int = 0) -> None:
        self._folder = topology.path.parent / f"{name}{number}"
        self._folder.mkdir()
        self._output_file = self._folder / "output.txt"
        with self._output_file.open("wb") as output:
            self.process = template().start(
                ["longshore.deploy", "node", "--topology", str(topology.path), "--name", name],
                {**os.environ, "TMPDIR": str(self._folder), "UCX_TLS": "tcp"},
                output,
            )

    @property
    def output(self) -> str:
        return self._output_file.read_text()

    def wait_until_ready(self) -> "NodeProcess":
        wait_until(lambda: "ready at" in self.output or self.process.poll() is not None, 180)
        assert "ready at" in self.output, self.output
        return self

    def admin(self, action: Action) -> Result:
        """Perform an action for one process or engine of the node."""
        (socket_path,) = self._folder.glob(f"longshore-*/{SOCKET_NAME}.sock")
        with perform(socket_path, action) as (answer, _):
            (result,) = answer.results
        return result

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.process.terminate()
        return int(self.process.wait(timeout=PATIENCE_S))

    def kill(self) -> None:
        """End it as a power failure would: all processes at once."""
        family = [*self.process.children(recursive=True), self.process]
        for process in family:
            process.kill()
        psutil.wait_procs(family, timeout=PATIENCE_S)

    def __enter__(self) -> "NodeProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_running():
            self.kill()
