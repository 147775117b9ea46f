"""Messages of the commands. As a library Octavo stays silent below a warning, as logging's own defaults have it."""

from __future__ import annotations

import logging
import os

from octavo.core.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")


def set_up_logging() -> None:
    """Sends messages of logger "octavo" to standard error, from the level that ``OCTAVO_LOG_LEVEL`` names (info).

    Raises:
        ConfigError: there is no such level.
    """
    level = os.environ.get("OCTAVO_LOG_LEVEL") or "info"
    if level.lower() not in LEVELS:
        raise ConfigError(f"OCTAVO_LOG_LEVEL must be one of {', '.join(LEVELS)}, not {level!r}")
    logger = logging.getLogger("octavo")
    logger.setLevel(level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("octavo: %(levelname)s: %(message)s"))
    logger.handlers = [handler]
