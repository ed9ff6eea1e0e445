"""`longshore kv`: lists, checks and removes the KV blocks that the disk tier keeps."""

import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from longshore.connectors.offloading.disk import catalog
from longshore.connectors.offloading.disk.catalog import RankReport, StoreReport
from longshore.connectors.offloading.disk.errors import DiskStoreError, StoreInUse
from longshore.connectors.offloading.disk.identity import IDENTITY_FILE
from longshore.protocol.errors import ConfigError

ID_CHARS: Final = 8
"""Digits of a store's id that are shown; a beginning of any length selects a store."""

_AGE: Final = re.compile(r"(?P<number>\d+)(?P<unit>[smhd])")
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class StoreSummary(msgspec.Struct, frozen=True):
    """num_blocks: that all ranks have, at most. last_write_s: Unix time. problems: what is
    damaged; the blocks that it affects are not used."""

    id: str
    model: str | None
    dtype: str | None
    ranks: list[int]
    num_ranks: int | None
    num_blocks: int
    size_bytes: int
    last_write_s: float
    in_use: bool
    problems: list[str]


class BadBlock(msgspec.Struct, frozen=True):
    store: str
    rank: int
    key: str
    slot: int
    path: str
    problem: str


class Verification(msgspec.Struct, frozen=True):
    """problems: damage other than of blocks."""

    num_blocks: int
    size_bytes: int
    bad_blocks: list[BadBlock]
    problems: list[str]


def list_stores(path: Path, *, as_json: bool) -> None:
    """`longshore kv ls`"""
    stores = [summary_of(store) for store in catalog.stores(path)]
    if as_json:
        _print_json(stores)
        return
    console = _console()
    if not stores:
        console.print(f"There are no stores in {path}.")
        return
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("store", no_wrap=True)
    table.add_column("model", overflow="fold")
    for name in ("dtype", "ranks"):
        table.add_column(name, no_wrap=True)
    for name in ("blocks", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("last write", no_wrap=True)
    table.add_column("state")
    for store in stores:
        table.add_row(
            store.id[:ID_CHARS],
            store.model or "?",
            store.dtype or "?",
            f"{len(store.ranks)} of {store.num_ranks or '?'}",
            f"{store.num_blocks:,}",
            _size(store.size_bytes),
            _when(store.last_write_s),
            ", ".join([*(["in use"] if store.in_use else []), *store.problems]),
        )
    console.print(table)


def show_stores(path: Path, store_id: str | None, *, as_json: bool) -> None:
    """`longshore kv stats`"""
    stores = _chosen(path, store_id)
    if as_json:
        _print_json([_details_of(store) for store in stores])
        return
    console = _console()
    if not stores:
        console.print(f"There are no stores in {path}.")
    for store in stores:
        details = Table(title=f"store {store.directory.name}", title_justify="left")
        details.add_column("identity")
        details.add_column("", overflow="fold")
        for name, value in _identity_of(store).items():
            details.add_row(name.replace("_", " "), str(value))
        console.print(details)
        ranks = Table()
        for name in ("rank", "blocks", "block bytes", "on disk", "slot"):
            ranks.add_column(name, justify="right")
        for name in ("last write", "state"):
            ranks.add_column(name)
        for rank in store.ranks:
            ranks.add_row(
                str(rank.rank),
                f"{rank.num_entries:,}",
                _size(rank.entry_bytes),
                _size(rank.size_bytes),
                _size(rank.slot_bytes),
                _when(rank.last_write_s),
                ", ".join([*(["in use"] if rank.in_use else []), *_rank_problems(rank)]),
            )
        console.print(ranks)


def verify(path: Path, store_id: str | None, *, as_json: bool) -> int:
    """`longshore kv verify`; returns the exit status."""
    stores = _chosen(path, store_id)
    total = sum(rank.entry_bytes for store in stores for rank in store.ranks)
    num_blocks = size_bytes = 0
    bad: list[BadBlock] = []
    problems: list[str] = []
    hidden = as_json or not sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, disable=hidden, file=sys.stderr) as bar:
        for store in stores:
            problems += [f"store {store.directory.name}: {what}" for what in _problems(store)]
            for rank in store.ranks:
                if rank.index_problem:
                    continue
                for check in catalog.check_blocks(rank):
                    num_blocks += 1
                    size_bytes += check.entry.size_bytes
                    bar.update(check.entry.size_bytes)
                    if check.problem:
                        bad.append(_bad_block(store, rank, check))
    result = Verification(num_blocks, size_bytes, bad, problems)
    if as_json:
        _print_json(result)
    elif not stores:
        _console().print(f"There are no stores in {path}.")
    else:
        _print_verification(result)
    return 1 if bad or problems else 0


def clean(
    path: Path,
    *,
    model: str | None,
    store_id: str | None,
    every: bool,
    older_than: str | None,
    yes: bool,
) -> None:
    """`longshore kv clean`"""
    if not (model or store_id or every or older_than):
        raise ConfigError(
            "nothing is chosen: use --model NAME, --store ID, --older-than AGE or --all"
        )
    latest_s = time.time() - age_s(older_than) if older_than else float("inf")
    chosen = [
        store
        for store in _chosen(path, store_id)
        if (model is None or (store.identity is not None and store.identity.model_name == model))
        and store.last_write_s <= latest_s
    ]
    console = _console()
    if not chosen:
        console.print("No store matches; nothing was deleted.")
        return
    for store in chosen:
        if store.in_use:
            raise StoreInUse(
                f"store {store.directory.name[:ID_CHARS]} ({store.name}) is in use; stop the "
                "engine that uses it first. Nothing was deleted."
            )
    for store in chosen:
        console.print(
            f"{store.directory.name[:ID_CHARS]}  {store.name}  {_size(store.size_bytes)}  "
            f"last write {_when(store.last_write_s)}"
        )
    if not yes and not _confirmed(len(chosen)):
        console.print("Nothing was deleted.")
        return
    for store in chosen:
        catalog.remove(store)
    total = _size(sum(store.size_bytes for store in chosen))
    console.print(f"Deleted {_count(len(chosen), 'store')}, {total}.")


def age_s(text: str) -> float:
    """Seconds in `90s`, `30m`, `12h` or `7d`. Raises ConfigError."""
    if (age := _AGE.fullmatch(text)) is None:
        raise ConfigError(f"--older-than {text}: give a number and a unit: 90s, 30m, 12h or 7d")
    return int(age["number"]) * _UNIT_S[age["unit"]]


def summary_of(store: StoreReport) -> StoreSummary:
    identity = store.identity
    return StoreSummary(
        id=store.directory.name,
        model=identity.model_name if identity else None,
        dtype=identity.dtype if identity else None,
        ranks=[rank.rank for rank in store.ranks],
        num_ranks=identity.num_ranks if identity else None,
        num_blocks=min((rank.num_entries for rank in store.ranks), default=0),
        size_bytes=store.size_bytes,
        last_write_s=store.last_write_s,
        in_use=store.in_use,
        problems=_problems(store),
    )


def _chosen(path: Path, store_id: str | None) -> list[StoreReport]:
    """All stores, or the one whose id begins with `store_id`. Raises DiskStoreError."""
    stores = catalog.stores(path)
    if store_id is None:
        return stores
    found = [store for store in stores if store.directory.name.startswith(store_id)]
    if len(found) != 1:
        ids = ", ".join(store.directory.name[:ID_CHARS] for store in found or stores)
        what = "no store" if not found else "more than one store"
        raise DiskStoreError(f"{what} in {path} has an id that begins with {store_id}: {ids}")
    return found


def _problems(store: StoreReport) -> list[str]:
    damaged = [] if store.identity else [f"{IDENTITY_FILE} is missing or damaged"]
    return damaged + [
        f"rank {rank.rank}: {problem}" for rank in store.ranks for problem in _rank_problems(rank)
    ]


def _rank_problems(rank: RankReport) -> list[str]:
    if rank.index_problem:
        return [f"the index is unusable: {rank.index_problem}"]
    if rank.num_damaged_records:
        return [f"the index has {_count(rank.num_damaged_records, 'damaged record')}"]
    return []


def _details_of(store: StoreReport) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(summary_of(store)),
        "identity": _identity_of(store),
        "by_rank": [
            {
                "rank": rank.rank,
                "num_blocks": rank.num_entries,
                "block_bytes": rank.entry_bytes,
                "size_bytes": rank.size_bytes,
                "slot_bytes": rank.slot_bytes,
                "last_write_s": rank.last_write_s,
                "in_use": rank.in_use,
            }
            for rank in store.ranks
        ],
    }


def _identity_of(store: StoreReport) -> dict[str, Any]:
    return msgspec.structs.asdict(store.identity) if store.identity is not None else {}


def _bad_block(store: StoreReport, rank: RankReport, check: catalog.BlockCheck) -> BadBlock:
    return BadBlock(
        store=store.directory.name,
        rank=rank.rank,
        key=check.entry.key.hex(),
        slot=check.entry.slot,
        path=str(check.path),
        problem=check.problem,
    )


def _print_verification(result: Verification) -> None:
    console = _console()
    for problem in result.problems:
        console.print(f"damaged: {problem}")
    for block in result.bad_blocks:
        console.print(
            f"corrupt: block {block.key} in {block.path}, slot {block.slot}: {block.problem}"
        )
    read = f"{_count(result.num_blocks, 'block')}, {_size(result.size_bytes)}"
    if result.bad_blocks or result.problems:
        console.print(
            f"Read {read}: {_count(len(result.bad_blocks), 'corrupt block')}, "
            f"{_count(len(result.problems), 'other problem')}. The disk tier does not use what is "
            "damaged, and replaces it; if this happens again, check the disk."
        )
    else:
        console.print(f"Read {read}: all of them are good.")


def _confirmed(num_stores: int) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("standard input is not a terminal, so nothing can be asked; use --yes")
    return input(f"Delete {_count(num_stores, 'store')}? [y/N] ").strip().lower() in ("y", "yes")


def _print_json(content: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(content)).decode())


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False, markup=False)


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M") if time_s else "never"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
