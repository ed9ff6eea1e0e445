"""The private admin socket: takes one action per connection, answers it, and closes.

A Unix socket with mode 0600 in the runtime directory, which has mode 0700: only the user who runs
the deployment can connect. An answer is one line; files follow it until the end of the connection.
"""

import contextlib
import logging
import os
import shutil
import socketserver
import threading
from pathlib import Path
from typing import Final

import msgspec

from longshore.deploy.admin.actions import (
    ACTION_NAMES,
    MAX_REQUEST_BYTES,
    SOCKET_NAME,
    Answer,
    Drain,
    decode_action,
)
from longshore.deploy.admin.operations import Operations
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.protocol.errors import shortened

logger = logging.getLogger(__name__)

READ_TIMEOUT_S: Final = 5.0
MAX_ACTIONS: Final = 32


class AdminServer:
    """Serves until the end of the `with` block; each connection has a thread."""

    def __init__(self, runtime_dir: RuntimeDir, operations: Operations) -> None:
        self.path = runtime_dir.socket_path(SOCKET_NAME)
        self._server = _Server(self.path, operations)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="admin", daemon=True
        )

    def __enter__(self) -> "AdminServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_ACTIONS

    def __init__(self, path: Path, operations: Operations) -> None:
        self.operations = operations
        self.slots = threading.BoundedSemaphore(MAX_ACTIONS)
        super().__init__(str(path), _Connection)

    def server_bind(self) -> None:
        super().server_bind()
        os.chmod(str(self.server_address), 0o600)

    def handle_error(self, request: object, client_address: object) -> None:
        logger.exception("an action of the operator failed")


class _Connection(socketserver.StreamRequestHandler):
    timeout = READ_TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            line = self.rfile.readline(MAX_REQUEST_BYTES)
            if not self.server.slots.acquire(blocking=False):
                self._send(Answer(False, error=f"{MAX_ACTIONS} actions are under way; wait"))
                return
            try:
                self._handle(line)
            finally:
                self.server.slots.release()

    def _handle(self, line: bytes) -> None:
        try:
            action = decode_action(line)
        except msgspec.MsgspecError as error:
            names = ", ".join(ACTION_NAMES)
            why = shortened(str(error))
            self._send(Answer(False, error=f"not an action: {why}. Actions are {names}"))
            return
        answer, files = self.server.operations.perform(action)
        try:
            self._send(answer)
            for path in files:
                with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                    shutil.copyfileobj(file, self.wfile)
        finally:
            for path in files:
                path.unlink(missing_ok=True)
        if isinstance(action, Drain):  # the connection ends with the deployment, or the client
            self.connection.settimeout(None)
            self.connection.recv(1)

    def _send(self, answer: Answer) -> None:
        self.connection.settimeout(None)
        self.wfile.write(msgspec.json.encode(answer) + b"\n")
