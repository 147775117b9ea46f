"""Files of text that options and flags name."""

from __future__ import annotations

from pathlib import Path

from octavo.core.errors import ConfigError


def read_text(path: str | Path, what: str) -> str:
    """The text of a file that an option or a flag names; ``what`` messages call it.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).expanduser().read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {what} {path}: {reason}") from None
