"""The API keys of a server: from an option, the file that another names, and the environment."""

from __future__ import annotations

import logging
import stat
from collections.abc import Mapping

from octavo.core.errors import ConfigError
from octavo.core.server_options import API_KEYS_VARIABLE, ServerOptions, names

logger = logging.getLogger("octavo")


def read_api_keys(options: ServerOptions, environ: Mapping[str, str]) -> list[str]:
    """API keys from the options, the file and the environment; if there are none, requests need no key.

    Raises:
        ConfigError: the file is unreadable or holds no key, or a key has characters that a header cannot carry.
    """
    keys = names(environ.get(API_KEYS_VARIABLE)) + names(options.api_key)
    path = options.api_key_file
    if path is not None:
        try:
            mode = path.stat().st_mode
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"cannot read api_key_file {path}: {getattr(e, 'strerror', None) or e}") from None
        if stat.S_ISREG(mode) and mode & stat.S_IROTH:
            # Not an error: secrets mounted into containers have such permissions.
            logger.warning("api_key_file %s can be read by every user of this machine", path)
        from_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not from_file:
            raise ConfigError(f"api_key_file {path} holds no key; write one a line")
        keys += from_file
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("an API key must be made of visible ASCII characters")
    return keys
