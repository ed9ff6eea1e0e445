"""`longshore`, which also shows its gateway's configuration to tests: the socket of the scheduler,
and the secret that opens it."""

import os
from pathlib import Path
from typing import Any, Final

import msgspec

from longshore.deploy.cli.main import main
from longshore.deploy.gateway.config import GatewayConfig
from longshore.deploy.supervisor import process_set
from longshore.deploy.supervisor.process import ManagedProcess, ProcessSpec

FILE: Final = "gateway.json"


class _ShownProcess(ManagedProcess):
    def __init__(self, spec: ProcessSpec, *others: Any) -> None:
        super().__init__(spec, *others)
        if isinstance(spec.config, GatewayConfig):
            Path(os.environ["TMPDIR"], FILE).write_bytes(msgspec.json.encode(spec.config))


if __name__ == "__main__":
    process_set.ManagedProcess = _ShownProcess  # type: ignore[misc]
    main()
