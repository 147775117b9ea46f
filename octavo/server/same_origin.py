"""Which pages of a browser may use the server: checks of the Host of every request, and of the origin of its sender.

Two attacks come through the browser of somebody who can reach the server. Under DNS rebinding a page's own name leads
to the server's address, so that the browser takes both for one origin: only the ``Host`` gives it away. In cross-site
request forgery a page sends what browsers send anywhere without asking, such as a form: its origin gives it away.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.core.server_options import ServerOptions, host_name
from octavo.server.api_errors import ApiError

#: Methods that only read.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {"http": "80", "https": "443"}
#: A request target in absolute form (RFC 9112, 3.2.2): scheme, authority, path.
_ABSOLUTE = re.compile(r"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^\[\]:@/\\\s]*)(?::([0-9]{0,5}))?")


def split_authority(authority: str) -> tuple[str, str] | None:
    """(normalised host, port or "") of a Host header or of an authority in a URL; None: it is malformed."""
    match = _AUTHORITY.fullmatch(authority.strip())
    if match is None or not (name := host_name(match.group(1))):
        return None
    return name, match.group(2) or ""


def is_loopback_name(host: str) -> bool:
    """Whether a normalised host is ``localhost`` or a loopback address; no DNS server can give these to another."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def host_rule(options: ServerOptions, *, has_keys: bool) -> Callable[[str], bool] | None:
    """Which hosts requests may name; None: any.

    With API keys a rebound page knows no key. On another address than loopback the server's names are not known here,
    so only ``allowed_hosts`` limits them.
    """
    allowed = options.allowed_hosts
    if "*" in allowed or not (allowed or (options.is_local and not has_keys)):
        return None
    names = frozenset(name for name in allowed if not name.startswith("*."))
    suffixes = tuple(name[1:] for name in allowed if name.startswith("*."))
    return lambda host: host in names or host.endswith(suffixes) or is_loopback_name(host)


class SameOriginMiddleware:
    """Middleware that refuses hosts that are not the server's, and changes that pages of other origins ask for."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        is_own_host: Callable[[str], bool] | None,
        origins: Sequence[str],
        operator_paths: Collection[str] = (),
    ) -> None:
        """``is_own_host``: see ``host_rule``; ``origins``: those allowed, ``*`` for all, but not at ``operator_paths``,
        which change the server: there an origin has to be named."""
        self.app = app
        self._is_own_host = is_own_host
        self._origins = frozenset(origins)
        self._operator_paths = frozenset(operator_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 400 or 403, or passes the request on; a target in absolute form as its path."""
        if scope["type"] == "http":
            try:
                _read_absolute_form(scope)
                self._check_host(scope)
                if scope["method"] not in _SAFE_METHODS:
                    self._check_origin(scope)
            except ApiError as e:
                await e.response(scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        if self._is_own_host is None:
            return
        hosts = Headers(scope=scope).getlist("host")
        parts = split_authority(hosts[0]) if len(hosts) == 1 else None
        # An address that a connection has reached is the server's; only names can be made to lead to others.
        own_address = (scope.get("server") or ("",))[0]
        if parts is None or not (self._is_own_host(parts[0]) or parts[0] == host_name(own_address)):
            named = repr(hosts[0][:100]) if hosts else "none"
            message = (
                f"the request's Host is {named}, which is not a name of this server; use localhost, or name it in "
                "allowed_hosts"
            )
            raise ApiError(403, message, kind="permission_error", code="host_not_allowed", headers=_CLOSE)

    def _check_origin(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and self._is_allowed(origin, scope["path"]):
            return
        # What browsers say of a request's site no page can set (a forbidden request header of the Fetch standard). It
        # holds behind proxies, too, that replace the Host. "none": somebody's own doing, such as a bookmark.
        if site is not None:
            is_same = site.lower() in ("same-origin", "none")
        else:
            is_same = origin is None or _is_same_origin(origin, headers.get("host", ""), scope["scheme"])
        if not is_same:
            message = f"pages of {origin or 'other sites'!r:.100} may not do this (allowed_origins)"
            raise ApiError(403, message, kind="permission_error", code="origin_not_allowed", headers=_CLOSE)

    def _is_allowed(self, origin: str, path: str) -> bool:
        return origin in self._origins or ("*" in self._origins and path not in self._operator_paths)


#: The body is not read.
_CLOSE = {"Connection": "close"}


def _read_absolute_form(scope: Scope) -> None:
    """Replaces a target in absolute form by its path; its authority counts as Host, whatever the header says.

    Raises:
        ApiError: 400, there is no authority.
    """
    match = _ABSOLUTE.fullmatch(scope["path"])
    if match is None:
        return
    authority, path = match.groups()
    if not authority:
        raise ApiError(400, "the request's target is a URL without a host", code="invalid_target", headers=_CLOSE)
    raw = _ABSOLUTE.fullmatch(scope.get("raw_path", b"").decode("latin-1"))
    scope["path"] = path or "/"
    scope["raw_path"] = ((raw and raw.group(2)) or "/").encode("latin-1")
    MutableHeaders(scope=scope)["host"] = authority


def _is_same_origin(origin: str, host: str, scheme: str) -> bool:
    """Whether an ``Origin`` is that of a ``Host``. The server may speak http to a proxy that speaks https."""
    origin_scheme, separator, authority = origin.partition("://")
    origin_scheme = origin_scheme.lower()
    if not separator or origin_scheme not in _DEFAULT_PORTS or (scheme == "https" and origin_scheme != "https"):
        return False  # "null", too
    theirs, ours, default = split_authority(authority), split_authority(host), _DEFAULT_PORTS[origin_scheme]
    if theirs is None or ours is None:
        return False
    return theirs[0] == ours[0] and (theirs[1] or default) == (ours[1] or default)
