"""`longshore admin`: sends an action to a running deployment and prints what it did."""

import contextlib
import os
import shutil
import sys
from pathlib import Path

import msgspec

from longshore.deploy.admin.actions import Action, Answer, Drain, KVSnapshot
from longshore.deploy.admin.client import deployments, perform
from longshore.protocol.errors import ConfigError


def run(action: Action, socket: Path, *, as_json: bool) -> int:
    """Returns the exit status: 0 if everything was done, else 1. Raises ConfigError if the action
    is not valid, AdminFailed."""
    with perform(socket, _valid(action)) as (answer, content):
        _check(answer)
        if as_json:
            print(msgspec.json.encode(answer).decode(), flush=True)
        else:
            for result in answer.results:
                print(f"{result.process}: {result.message}", flush=True)
        if isinstance(action, Drain):
            with contextlib.suppress(OSError):
                content.read()  # until the deployment has ended
    return 0 if answer.ok else 1


def print_deployments(*, as_json: bool) -> None:
    found = deployments()
    if as_json:
        print(msgspec.json.encode({url: str(path) for path, url in found.items()}).decode())
    for path, url in () if as_json else found.items():
        print(f"{url}  {path}")


def run_snapshot(action: KVSnapshot, socket: Path, output: Path | None) -> int:
    """Do the same; the snapshots of engines that failed are missing, and named on standard
    error."""
    with perform(socket, action) as (answer, content):
        _check(answer)
        for result in answer.results:
            print(f"{result.process}: {result.message}", file=sys.stderr)
        if output is None:
            sys.stdout.flush()
            shutil.copyfileobj(content, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        else:
            try:
                descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except OSError as error:
                raise ConfigError(f"output={output}: {error.strerror}") from error
            with open(descriptor, "wb") as file:
                shutil.copyfileobj(content, file)
    return 0 if answer.ok else 1


def _valid(action: Action) -> Action:
    """Raises ConfigError if a value is out of range: msgspec checks it when it decodes."""
    try:
        return msgspec.json.decode(msgspec.json.encode(action), type=Action)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def _check(answer: Answer) -> None:
    if answer.error is not None:
        raise ConfigError(answer.error)
