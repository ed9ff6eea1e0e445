"""The network interfaces of this machine."""

import fcntl
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final

LOOPBACK: Final = "lo"
_SIOCGIFADDR: Final = 0x8915
_IPV6_FILE: Final = Path("/proc/net/if_inet6")


def interface_of(host: str) -> str | None:
    """The interface that has this address; None: the machine has no such address."""
    try:
        address = ip_address(socket.getaddrinfo(host, None)[0][4][0])
    except (OSError, ValueError):
        return None
    if address.is_loopback:
        return LOOPBACK
    return next((name for name, each in _addresses() if each == address), None)


def _addresses() -> Iterator[tuple[str, IPv4Address | IPv6Address]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                yield name, IPv4Address(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    if _IPV6_FILE.exists():
        for line in _IPV6_FILE.read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            yield name, IPv6Address(bytes.fromhex(digits))
