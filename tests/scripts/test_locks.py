"""The locks of `scripts/lock` agree with pyproject.toml, constraints.txt and each other."""

import re
import tomllib
from collections.abc import Iterator
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from longshore.connectors.lmcache.options import LMCACHE_VERSION
from tests.conftest import ROOT

NAMES: Final = ("dev", "runtime", "services", "no-deps")
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: Final = PROJECT["optional-dependencies"]
RUNTIME_EXTRAS: Final = ("audio", "s3")


def locked(name: str) -> dict[str, str]:
    """The versions that a lock has for this interpreter."""
    return {
        canonicalize_name(requirement.name): next(iter(requirement.specifier)).version
        for requirement, _ in entries(name)
        if requirement.marker is None or requirement.marker.evaluate()
    }


def entries(name: str) -> Iterator[tuple[Requirement, list[str]]]:
    """The requirements of a lock, and the hashes of each."""
    text = (ROOT / "locks" / f"{name}.txt").read_text()
    for entry in text.replace("\\\n", " ").splitlines():
        requirement, *hashes = entry.split(" --hash=")
        yield Requirement(requirement.strip()), [each.strip() for each in hashes]


def demanded(extra: str) -> list[Requirement]:
    """With the requirements of the extras that it names."""
    found = []
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name == PROJECT["name"]:
            found += [each for one in sorted(requirement.extras) for each in demanded(one)]
        else:
            found.append(requirement)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_package_of_a_lock_has_one_version_and_hashes(name: str) -> None:
    for requirement, hashes in entries(name):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", requirement
        assert requirement.url is None
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes)


@pytest.mark.parametrize(
    ("name", "extras"),
    [("dev", ("dev",)), ("runtime", RUNTIME_EXTRAS), ("services", ("dev", "lmcache", "ray"))],
)
def test_a_lock_has_what_pyproject_demands(name: str, extras: tuple[str, ...]) -> None:
    versions = locked("dev") | locked(name) if name == "services" else locked(name)
    wanted = [Requirement(each) for each in PROJECT["dependencies"]]
    wanted += [each for extra in extras for each in demanded(extra)]
    for requirement in wanted:
        if requirement.name != "torch":
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


def test_what_is_installed_without_dependencies_is_what_pyproject_and_the_code_name() -> None:
    versions = locked("no-deps")
    for requirement in (*demanded("nixl"), *demanded("mooncake"), *demanded("xgrammar")):
        assert requirement.specifier.contains(versions[requirement.name])
    assert versions["lmcache"] == LMCACHE_VERSION


def test_locks_agree_with_constraints_and_each_other_and_leave_torch_out() -> None:
    dev = locked("dev")
    assert locked("runtime").items() <= dev.items()
    assert not locked("services").keys() & dev.keys()
    constraints = {
        requirement.name: next(iter(requirement.specifier)).version
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
        for requirement in [Requirement(line)]
    }
    torch = constraints.pop("torch")
    assert Requirement(torch_demand()).specifier.contains(torch)
    assert constraints.items() <= dev.items()
    assert all("torch" not in locked(name) for name in NAMES)


def torch_demand() -> str:
    (found,) = (each for each in PROJECT["dependencies"] if each.startswith("torch"))
    return str(found)


def test_every_dependency_has_an_upper_bound() -> None:
    for text in (*PROJECT["dependencies"], *(each for extra in EXTRAS.values() for each in extra)):
        requirement = Requirement(text)
        if requirement.name != PROJECT["name"]:
            assert any(each.operator == "<" for each in requirement.specifier), text


def test_an_upper_bound_is_the_release_after_the_one_that_is_tested() -> None:
    """Packages of `cuda` are not locked: nothing here can install them."""
    versions = {name: each for lock in NAMES for name, each in locked(lock).items()}
    constraints = (ROOT / "constraints.txt").read_text()
    versions["torch"] = constraints.partition("torch==")[2].split()[0]
    texts = [each for name, extra in EXTRAS.items() if name != "cuda" for each in extra]
    for text in (*PROJECT["dependencies"], *texts):
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            continue
        version = Version(versions[canonicalize_name(requirement.name)])
        (bound,) = (Version(each.version) for each in requirement.specifier if each.operator == "<")
        minor = Version(f"0.{version.minor + 1}")
        assert bound == Version(str(version.major + 1)) or (version.major == 0 and bound == minor)
