"""``octavo list``: the models in the cache."""

from __future__ import annotations

from typing import Any

from octavo.cli.info import readable_size
from octavo.cli.parsing import Arguments, Parser, add_json_flag, refuse_words, write_json
from octavo.loader.builtin import BUILTIN
from octavo.loader.files import CachedModel, cache_dir, cached_models

EXAMPLE = """\
examples:
  octavo list
  octavo list --json -

The cache (OCTAVO_CACHE) holds built-in models and what was made of GGUF files. Models of the hub are in the cache of
huggingface_hub: 'hf cache ls' shows them.
"""


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo list",
        usage="octavo list [options]",
        description="Lists the models in the cache: name, kind, size and folder. 'octavo rm NAME' removes one.",
        epilog=EXAMPLE,
    )
    add_json_flag(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Prints the models, as a table or as one JSON object."""
    refuse_words(arguments)
    models = cached_models()
    if arguments.json is not None:
        write_json(arguments.json, {"models": [as_json(model) for model in models]})
        return 0
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        kind = f"{model.kind} ({model.dtype})" if model.dtype else model.kind
        kind += ", base model" if _is_base(model) else ""
        print(f"{model.name:<{width}}  {kind:<32}  {readable_size(model.size):>10}  {model.folder}")
    total = readable_size(sum(model.size for model in models))
    print(f"{total} in {len(models)} folders of {cache_dir()}")
    return 0


def _is_base(model: CachedModel) -> bool:
    """Whether it is a built-in one that continues texts and answers no questions."""
    return model.name in BUILTIN and BUILTIN[model.name].is_base


def as_json(model: CachedModel) -> dict[str, Any]:
    """A model as ``--json`` shows it."""
    return {
        "name": model.name,
        "kind": model.kind,
        "dtype": model.dtype,
        "base_model": _is_base(model),
        "size_bytes": model.size,
        "folder": str(model.folder),
    }
