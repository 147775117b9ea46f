"""Sources of options: a configuration file, and flags."""

from __future__ import annotations

from pathlib import Path

from octavo.cli.flags import add_engine_flags, read_engine_config
from octavo.cli.parsing import Parser
from octavo.config.engine_config import EngineConfig


def write_file(folder: Path, text: str) -> Path:
    path = folder / "octavo.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def config_from_flags(*argv: str) -> EngineConfig:
    parser = Parser(prog="octavo")
    add_engine_flags(parser)
    return read_engine_config(parser.read(argv), "m")
