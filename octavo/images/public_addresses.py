"""Which addresses of the Internet a stranger may have the server connect to: none within the network that it is in."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

from octavo.core.errors import InvalidRequestError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Public by their number, but answered within a cloud: by the host of an Azure machine.
_WITHIN_CLOUDS = frozenset({ipaddress.ip_address("168.63.129.16")})
#: Its last 32 bits are an IPv4 address that a gateway connects to (RFC 6052).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str, exceptions: Sequence[Network] = ()) -> bool:
    """Whether an address is one of the public Internet, or of one of the networks that are taken all the same.

    Not public: loopback, private, link-local (where clouds have their metadata), shared (carrier-grade NAT), multicast,
    unspecified and reserved ones, and addresses of IPv6 that hold such a one of IPv4.
    """
    parsed: _Address = ipaddress.ip_address(address.partition("%")[0])
    for inner in _held(parsed):
        if any(inner.version == network.version and inner in network for network in exceptions):
            continue
        if not inner.is_global or inner.is_multicast or inner in _WITHIN_CLOUDS:
            return False
    return True


def _held(address: _Address) -> list[_Address]:
    """The address, or the ones of IPv4 that it leads to."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    held: list[_Address] = [address]
    if address.sixtofour is not None:
        held.append(address.sixtofour)
    if address.teredo is not None:
        held.extend(address.teredo)
    if address in _NAT64:
        held.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return held


async def public_addresses(host: str, port: int, exceptions: Sequence[Network], name: str) -> list[str]:
    """The addresses of a host, all of which are public.

    Of a host that has also others none is taken: its next answer might be another one.

    Raises:
        InvalidRequestError: it has no address, or one that is not public; ``name`` is what the error is about.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError):
        raise InvalidRequestError(f"{name}: the host {host!r} is not found") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not all(is_public(address, exceptions) for address in addresses):
        raise InvalidRequestError(
            f"{name}: the host {host!r} has an address that is not public, from which this server fetches nothing"
        )
    return addresses
