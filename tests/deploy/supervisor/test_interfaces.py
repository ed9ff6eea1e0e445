"""Which network interface has an address."""

import socket

import psutil
import pytest

from longshore.deploy.supervisor.interfaces import interface_of

OWN = [
    pytest.param(address.address, name, id=f"{name} {address.family.name}")
    for name, addresses in psutil.net_if_addrs().items()
    for address in addresses[:1]
    if address.family in (socket.AF_INET, socket.AF_INET6)
]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1"])
def test_loopback_addresses_have_the_loopback_interface(host: str) -> None:
    assert interface_of(host) == "lo"


@pytest.mark.parametrize(("host", "name"), OWN)
def test_each_address_of_this_machine_has_its_interface(host: str, name: str) -> None:
    assert interface_of(host) == name


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7", "no such host"])
def test_other_addresses_have_none(host: str) -> None:
    assert interface_of(host) is None
