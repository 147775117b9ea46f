"""Where clients say that an image is: in a data URL, or at a URL that the server may fetch from."""

from __future__ import annotations

import asyncio
import binascii
import importlib
import ipaddress
import re
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.errors import InvalidRequestError
from octavo.images.image_files import DEFAULT_LIMITS

if TYPE_CHECKING:
    import httpx


# Which addresses of the Internet a stranger may have the server connect to: none within the network that it is in.

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


_REDIRECTS = (301, 302, 303, 307, 308)
#: Further ones of other clients wait.
_MOST_AT_ONCE = 32
_SPACES = re.compile(rb"[ \t\r\n]+")


@dataclass(frozen=True)
class UrlRules:
    """What may be fetched."""

    is_allowed: bool = False
    #: Hosts that URLs may name; none: all.
    domains: tuple[str, ...] = ()
    #: Networks whose addresses are taken although they are not public.
    networks: tuple[Network, ...] = ()
    #: From the name of the host to the last byte, redirects included.
    seconds: float = 10.0
    max_redirects: int = 3


def decode_base64(text: str, max_bytes: int = DEFAULT_LIMITS.max_bytes, name: str = "the image") -> bytes:
    """The bytes of a file in base64.

    Raises:
        InvalidRequestError: it is something else, or more bytes than the limit.
    """
    if len(text) * 3 // 4 > max_bytes + 2:
        raise InvalidRequestError(f"{name} has about {len(text) * 3 // 4} bytes; at most {max_bytes} are taken")
    try:
        return binascii.a2b_base64(_SPACES.sub(b"", text.encode()), strict_mode=True)
    except ValueError as e:
        raise InvalidRequestError(f"{name} is not valid base64: {e}") from None


def read_data_url(url: str, max_bytes: int = DEFAULT_LIMITS.max_bytes, name: str = "the image") -> bytes:
    """The bytes of a data URL (RFC 2397) in base64, such as ``data:image/png;base64,iVBORw0...``.

    What it says of their type does not matter: files say themselves what they are.

    Raises:
        InvalidRequestError: it is something else, or more bytes than the limit.
    """
    head, comma, _ = url[:200].partition(",")
    if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        raise InvalidRequestError(f"{name} must begin as data:image/png;base64, does, not with {url[:40]!r}")
    return decode_base64(url[len(head) + 1 :], max_bytes, name)


class ImageFetcher:
    """Fetches files from URLs of clients, within rules; used in one event loop.

    A connection goes to exactly the address that was checked, at each redirect anew, and is used once.
    """

    def __init__(
        self,
        rules: UrlRules,
        max_bytes: int = DEFAULT_LIMITS.max_bytes,
        *,
        certificates: ssl.SSLContext | None = None,
    ) -> None:
        """``certificates``: which ones of https are trusted; None: those that httpx does."""
        self._rules = rules
        self._certificates = certificates
        self._preparing: asyncio.Future[ssl.SSLContext] | None = None
        self._max_bytes = max_bytes
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)

    async def fetch(self, url: str, name: str = "the image") -> bytes:
        """The bytes of the file at a URL.

        Raises:
            InvalidRequestError: rules do not allow it; nothing, or too much, was sent in time; or there is no file.
        """
        rules = self._rules
        if not rules.is_allowed:
            raise InvalidRequestError(
                f"{name} is a URL, from which this server does not fetch (allow_image_urls is off): send the file "
                "itself, as data:image/png;base64,..."
            )
        async with self._turns:
            try:
                async with asyncio.timeout(rules.seconds):
                    async with self._client(await self._trusted()) as client:
                        return await self._follow(client, url, name)
            except TimeoutError:
                raise InvalidRequestError(f"{name} was not sent within {rules.seconds:g} seconds") from None

    def _client(self, certificates: ssl.SSLContext) -> httpx.AsyncClient:
        """One for each file, so that no connection that was made for another host at the same address is used.

        It uses no proxies of the environment, which would connect wherever the name leads by then.
        """
        import httpx

        return httpx.AsyncClient(
            verify=certificates,
            trust_env=False,
            follow_redirects=False,
            timeout=None,  # that of ``fetch``
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def _trusted(self) -> ssl.SSLContext:
        """What certificates are judged by; the first call reads them, in a thread, as that takes tenths of a second."""
        if self._certificates is None:
            if self._preparing is None:
                self._preparing = asyncio.ensure_future(asyncio.to_thread(_prepare))
            self._certificates = await asyncio.shield(self._preparing)  # others wait for it, too
        return self._certificates

    async def _follow(self, client: httpx.AsyncClient, url: str, name: str) -> bytes:
        for _ in range(self._rules.max_redirects + 1):
            answer = await self._get(client, url, name)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise InvalidRequestError(f"{name} is redirected more than {self._rules.max_redirects} times")

    async def _get(self, client: httpx.AsyncClient, url: str, name: str) -> bytes | str:
        """The file at a URL, or the URL that it redirects to."""
        import httpx

        target = self._checked_url(url, name)
        port = target.port or {"http": 80, "https": 443}[target.scheme]
        host = target.raw_host.decode()
        error: Exception | None = None
        for address in await public_addresses(host, port, self._rules.networks, name):
            request = client.build_request(
                "GET",
                target.copy_with(host=address, fragment=None),
                headers={"Host": target.netloc.decode(), "Accept": "image/*", "Accept-Encoding": "identity"},
                extensions={"sni_hostname": host},
            )
            try:
                return await self._read(client, request, target, name)
            except (httpx.ConnectError, httpx.ConnectTimeout) as e:
                error = e
            except httpx.HTTPError as e:
                raise InvalidRequestError(f"{name} cannot be fetched from {host}: {e or type(e).__name__}") from None
        raise InvalidRequestError(f"{name}: there is no connection to {host}: {error}")

    def _checked_url(self, url: str, name: str) -> httpx.URL:
        import httpx

        try:
            target = httpx.URL(url)
        except (httpx.InvalidURL, ValueError, TypeError) as e:
            raise InvalidRequestError(f"{name} is not a valid URL: {e}") from None
        if (target.port or 0) > 65535:
            raise InvalidRequestError(f"{name} is not a valid URL: there is no port {target.port}")
        if target.scheme not in ("http", "https") or not target.host:
            raise InvalidRequestError(
                f"{name} must be a URL that begins with http://, https:// or data:, not {url[:40]!r}"
            )
        if target.userinfo:
            raise InvalidRequestError(f"{name} is a URL with a user's name or password, which are not sent on")
        if self._rules.domains and target.host not in self._rules.domains:
            raise InvalidRequestError(
                f"{name}: this server does not fetch from {target.host!r}, only from "
                f"{_listed(self._rules.domains)} (allowed_media_domains)"
            )
        return target

    async def _read(
        self, client: httpx.AsyncClient, request: httpx.Request, target: httpx.URL, name: str
    ) -> bytes | str:
        response = await client.send(request, stream=True)
        try:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return str(target.join(response.headers["location"]))
            if response.status_code != 200:
                raise InvalidRequestError(f"{name}: {target.host} answers with status {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise InvalidRequestError(f"{name}: {target.host} sends it compressed, which was not asked for")
            content = bytearray()
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > self._max_bytes:
                    raise InvalidRequestError(f"{name} has more than the {self._max_bytes} bytes that are taken")
            return bytes(content)
        finally:
            await response.aclose()


def _prepare() -> ssl.SSLContext:
    """Imports all that a first connection imports, and reads the certificates that httpx trusts."""
    import httpx

    for name in ("httpcore", "anyio._backends._asyncio", "anyio.streams.tls"):
        importlib.import_module(name)
    return httpx.create_ssl_context(trust_env=False)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
