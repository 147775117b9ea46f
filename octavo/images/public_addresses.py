"""Which addresses of the Internet a stranger may have the server connect to: none within the network that it is in."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

from octavo.core.errors import InvalidRequestError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(map(ipaddress.ip_network, texts))


#: What is not public although it is unicast: IANA's IPv4 Special-Purpose Address Registry (RFC 6890), whether it calls
#: a network globally reachable or not, as none of them has servers of images. Multicast, too, and an address that is
#: public by its number, but answered within a cloud: by the host of an Azure machine.
_SPECIAL_IPV4 = _networks(
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.31.196.0/24",
    "192.52.193.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "192.175.48.0/24",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "168.63.129.16/32",
)
#: All global unicast addresses of IPv6 that are given out (RFC 4291 and IANA's registry of its address space).
_GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")
#: Those of them that are in IANA's IPv6 Special-Purpose Address Registry: protocols of the IETF (with Teredo),
#: documentation, 6to4, servers of AS112.
_SPECIAL_IPV6 = _networks("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
#: Its last 32 bits are an IPv4 address that a gateway connects to (NAT64, RFC 6052). The prefix of networks of one's
#: own, 64:ff9b:1::/48 (RFC 8215), is not among them: what it leads to is for such a network to say.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: Interface identifiers of ISATAP (RFC 5214) begin so; an IPv4 address follows, which a router may unpack.
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


def is_public(address: str, exceptions: Sequence[Network] = ()) -> bool:
    """Whether an address is one of the public Internet, or of one of the networks that are taken all the same.

    What is public is listed, and all else is not: loopback, private, link-local (where clouds have their metadata),
    site-local, shared (carrier-grade NAT), multicast, unspecified and reserved addresses, and those of IPv6 that lead
    to one of IPv4 that is not public.
    """
    parsed: _Address = ipaddress.ip_address(address.partition("%")[0])
    return all(_is_global(one) or _is_in(one, exceptions) for one in _destinations(parsed))


def _is_global(address: _Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not _is_in(address, _SPECIAL_IPV4)
    return address in _GLOBAL_IPV6 and not _is_in(address, _SPECIAL_IPV6)


def _is_in(address: _Address, networks: Sequence[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


def _destinations(address: _Address) -> list[_Address]:
    """Where packets for an address may end: itself, or the addresses of IPv4 that are packed into it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    last = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _NAT64:
        return [last]
    packed: list[_Address] = [address]
    if address.sixtofour is not None:
        packed.append(address.sixtofour)
    if address.teredo is not None:
        packed.extend(address.teredo)
    if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
        packed.append(last)
    return packed


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
