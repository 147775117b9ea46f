"""Images in requests: base64, data URLs, and URLs that the server may fetch from (protected against SSRF)."""

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


# Public addresses: a client must not make the server connect to its own network.

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(map(ipaddress.ip_network, texts))


#: Addresses that are not public: IANA's IPv4 Special-Purpose Address Registry (RFC 6890), even those that it calls
#: globally reachable, as none has image servers; multicast; and the address of Azure's host services.
_SPECIAL_IPV4 = _networks(
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
    "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32",
)  # fmt: skip
#: All assigned global unicast addresses of IPv6 (RFC 4291 and IANA's registry of its address space).
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
#: Exceptions: IANA's IPv6 Special-Purpose Address Registry (IETF protocols with Teredo, documentation, 6to4, AS112).
_SPECIAL_IPV6 = _networks("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
#: NAT64 (RFC 6052): the last 32 bits are an IPv4 address. Private ones, 64:ff9b:1::/48 (RFC 8215), are not public.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
#: Interface identifiers of ISATAP (RFC 5214), which an IPv4 address follows.
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


def is_public(address: str, exceptions: Sequence[Network] = ()) -> bool:
    """Whether an address is public, or in one of the networks ``exceptions``.

    Not public: loopback, private, link-local (with the metadata services of clouds), site-local, shared (carrier-grade
    NAT), multicast, unspecified, reserved, and those of IPv6 that lead to such an IPv4 address.
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
    """All addresses that packets may end at: the address itself, or IPv4 addresses packed into it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    last = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _NAT64:
        return [last]
    packed = [address, address.sixtofour, *(address.teredo or ())]
    packed += [last] if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP else []
    return [one for one in packed if one is not None]


async def public_addresses(host: str, port: int, exceptions: Sequence[Network], name: str) -> list[str]:
    """The addresses of a host; raises InvalidRequestError if any is not public, as its next answer might differ."""
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError):
        raise InvalidRequestError(f"the host {host!r} is not found", path=name) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    if not all(is_public(address, exceptions) for address in addresses):
        raise InvalidRequestError(
            f"the host {host!r} has an address that is not public, from which this server fetches nothing", path=name
        )
    return addresses


# Reading images.

_REDIRECTS = (301, 302, 303, 307, 308)
#: Maximum concurrent fetches; others wait.
_MOST_AT_ONCE = 32
_SPACES = re.compile(rb"[ \t\r\n]+")


@dataclass(frozen=True)
class UrlRules:
    is_allowed: bool = False
    #: Allowed hosts; empty: all.
    domains: tuple[str, ...] = ()
    #: Networks that are allowed although they are not public.
    networks: tuple[Network, ...] = ()
    #: From the name look-up to the last byte, redirects included.
    seconds: float = 10.0
    max_redirects: int = 3


def decode_base64(text: str, max_bytes: int = DEFAULT_LIMITS.max_bytes, name: str = "the image") -> bytes:
    """The bytes of a file in base64; raises InvalidRequestError if it is invalid or beyond the limit."""
    if len(text) * 3 // 4 > max_bytes + 2:
        raise InvalidRequestError(f"has about {len(text) * 3 // 4} bytes; at most {max_bytes} are taken", path=name)
    try:
        return binascii.a2b_base64(_SPACES.sub(b"", text.encode()), strict_mode=True)
    except ValueError as e:
        raise InvalidRequestError(f"is not valid base64: {e}", path=name) from None


def read_data_url(url: str, max_bytes: int = DEFAULT_LIMITS.max_bytes, name: str = "the image") -> bytes:
    """The bytes of a base64 data URL (RFC 2397) of any media type; raises InvalidRequestError."""
    head, comma, _ = url[:200].partition(",")
    if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        raise InvalidRequestError(f"must begin as data:image/png;base64, does, not with {url[:40]!r}", path=name)
    return decode_base64(url[len(head) + 1 :], max_bytes, name)


class ImageFetcher:
    """Fetches files from clients' URLs within rules; a connection goes to exactly the address that was checked."""

    def __init__(
        self, rules: UrlRules, max_bytes: int = DEFAULT_LIMITS.max_bytes, *, certificates: ssl.SSLContext | None = None
    ) -> None:
        """``certificates``: trusted by https; None: those of httpx."""
        self._rules = rules
        self._certificates = certificates
        self._preparing: asyncio.Future[ssl.SSLContext] | None = None
        self._max_bytes = max_bytes
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)

    async def fetch(self, url: str, name: str = "the image") -> bytes:
        """The file at a URL; raises InvalidRequestError if it is not allowed, missing, too slow or too large."""
        rules = self._rules
        if not rules.is_allowed:
            raise InvalidRequestError(
                "is a URL, from which this server does not fetch (allow_image_urls is off): send the file itself, "
                "as data:image/png;base64,...",
                path=name,
            )
        async with self._turns:
            try:
                async with asyncio.timeout(rules.seconds):
                    return await self._follow(url, name)
            except TimeoutError:
                raise InvalidRequestError(f"was not sent within {rules.seconds:g} seconds", path=name) from None

    async def _trusted(self) -> ssl.SSLContext:
        """The certificates; the first call reads them in a thread, which takes tenths of a second."""
        if self._certificates is None:
            if self._preparing is None:
                self._preparing = asyncio.ensure_future(asyncio.to_thread(_prepare))
            self._certificates = await asyncio.shield(self._preparing)  # others may wait for it, too
        return self._certificates

    async def _follow(self, url: str, name: str) -> bytes:
        certificates = await self._trusted()
        import httpx  # at once: ``_prepare`` has imported it in a thread

        # Proxies would look the name up again. A pooled connection might be that of another host at the same address.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(
            verify=certificates, trust_env=False, follow_redirects=False, timeout=None, limits=limits
        ) as client:
            for _ in range(self._rules.max_redirects + 1):
                answer = await self._get(client, url, name)
                if isinstance(answer, bytes):
                    return answer
                url = answer
        raise InvalidRequestError(f"is redirected more than {self._rules.max_redirects} times", path=name)

    async def _get(self, client: httpx.AsyncClient, url: str, name: str) -> bytes | str:
        """The file at a URL, or the URL that it redirects to."""
        import httpx

        target = self._checked_url(url, name)
        port = target.port or {"http": 80, "https": 443}[target.scheme]
        host = target.raw_host.decode()
        error: Exception | None = None
        for address in await public_addresses(host, port, self._rules.networks, name):
            headers = {"Host": target.netloc.decode(), "Accept": "image/*", "Accept-Encoding": "identity"}
            resolved = target.copy_with(host=address, fragment=None)
            request = client.build_request("GET", resolved, headers=headers, extensions={"sni_hostname": host})
            try:
                return await self._read(client, request, target, name)
            except (httpx.ConnectError, httpx.ConnectTimeout) as e:
                error = e
            except httpx.HTTPError as e:
                raise InvalidRequestError(
                    f"cannot be fetched from {host}: {e or type(e).__name__}", path=name
                ) from None
        raise InvalidRequestError(f"there is no connection to {host}: {error}", path=name)

    def _checked_url(self, url: str, name: str) -> httpx.URL:
        import httpx

        try:
            target = httpx.URL(url)
        except (httpx.InvalidURL, ValueError, TypeError) as e:
            raise InvalidRequestError(f"is not a valid URL: {e}", path=name) from None
        if (target.port or 0) > 65535:
            raise InvalidRequestError(f"is not a valid URL: there is no port {target.port}", path=name)
        if target.scheme not in ("http", "https") or not target.host:
            raise InvalidRequestError(
                "must be a URL that begins with http://, https:// or data:", path=name, got=url[:40]
            )
        if target.userinfo:
            raise InvalidRequestError("is a URL with a user's name or password, which are not sent on", path=name)
        if self._rules.domains and target.host not in self._rules.domains:
            domains = ", ".join(self._rules.domains[:5]) + (", ..." if len(self._rules.domains) > 5 else "")
            raise InvalidRequestError(
                f"this server does not fetch from {target.host!r}, only from {domains} (allowed_media_domains)",
                path=name,
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
                raise InvalidRequestError(f"{target.host} answers with status {response.status_code}", path=name)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise InvalidRequestError(f"{target.host} sends it compressed, which was not asked for", path=name)
            content = bytearray()
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > self._max_bytes:
                    raise InvalidRequestError(f"has more than the {self._max_bytes} bytes that are taken", path=name)
            return bytes(content)
        finally:
            await response.aclose()


def _prepare() -> ssl.SSLContext:
    """Imports everything that a first connection imports, and reads the certificates that httpx trusts."""
    import httpx

    for name in ("httpcore", "anyio._backends._asyncio", "anyio.streams.tls"):
        importlib.import_module(name)
    return httpx.create_ssl_context(trust_env=False)
