"""`longshore keys`: makes, rotates, shows and removes the keys of KV events."""

import os
from datetime import date
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from longshore.deploy.supervisor.event_keys import EventKeys
from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.errors import ConfigError


def create(
    name: str, *, public_key: str | None, output: Path | None, state_dir: Path | None
) -> None:
    """Authorize a new subscriber, and write its keys to a file unless it has its own."""
    _authorize(EventKeys(StateDir(state_dir)), name, public_key, output, is_new=True)


def rotate(
    name: str | None, *, public_key: str | None, output: Path | None, state_dir: Path | None
) -> None:
    """Authorize a second key of a subscriber, or replace the engines' keys (without a name)."""
    keys = EventKeys(StateDir(state_dir))
    if name is not None:
        _authorize(keys, name, public_key, output, is_new=False)
        print(f"Its old key is valid until you run `longshore keys remove {name} --old`.")
        return
    if public_key is not None or output is not None:
        raise ConfigError("--public-key and --output need the name of a subscriber")
    print(f"New public key of the engines: {keys.rotate_engines()}")
    print("Restart the server, and give this key to all subscribers (`server` in their files).")


def remove(name: str, *, only_old: bool, state_dir: Path | None) -> None:
    """Remove the keys of a subscriber from the list."""
    number = EventKeys(StateDir(state_dir)).remove(name, only_old=only_old)
    print(f"{number} key{'' if number == 1 else 's'} of {name} removed.")
    if number:
        print("A subscriber that is connected stays connected until the server is restarted.")


def show(*, as_json: bool, state_dir: Path | None) -> None:
    """Print all public keys."""
    keys = EventKeys(StateDir(state_dir))
    engines, subscribers = keys.of_engines(), keys.subscribers()
    if as_json:
        shown = {
            "engines": None if engines is None else engines.public,
            "subscribers": [subscriber._asdict() for subscriber in subscribers],
        }
        print(msgspec.json.encode(shown).decode())
        return
    if engines is None:
        print(f"No keys in {keys.folder}. Run `longshore keys create NAME`.")
        return
    table = Table("name", "public key", "added", box=None)
    table.add_row("(engines)", engines.public, "")
    for subscriber in subscribers:
        table.add_row(subscriber.name, subscriber.public, subscriber.added)
    Console(soft_wrap=True, markup=False, highlight=False).print(table)


def _authorize(
    keys: EventKeys, name: str, public_key: str | None, output: Path | None, *, is_new: bool
) -> None:
    today = date.today().isoformat()
    if public_key is not None:
        if output is not None:
            raise ConfigError(
                "--output is for a new secret key, but with --public-key none is made. Remove one "
                "of them."
            )
        keys.authorize(name, is_new=is_new, today=today, public=public_key)
        print(f"The key of {name} is authorized.")
        return
    path = output or Path(f"{name}.json")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be created ({error.strerror}). Choose another file with --output."
        ) from error
    with open(descriptor, "wb") as file:
        try:
            made = keys.authorize(name, is_new=is_new, today=today)
            file.write(msgspec.json.encode(made) + b"\n")
        except BaseException:
            path.unlink()
            raise
    print(f"{name} is authorized. Its keys are in {path}: copy the file to it, and delete it here.")
