"""``octavo rm``: removes models from the cache."""

from __future__ import annotations

from octavo.cli.info import readable_size
from octavo.cli.list import as_json
from octavo.cli.parsing import Arguments, Parser, add_json_flag, json_output, write_line
from octavo.core.errors import ConfigError, ModelNotFoundError, did_you_mean
from octavo.loader.files import CachedModel, cached_models, remove

EXAMPLE = """\
examples:
  octavo rm smollm2-135m
  octavo rm smollm2-135m-float32-08666b006d51fc7d

NAME is that of a model in 'octavo list', all of whose folders go, or of one folder. Only what is listed there can be
removed; the GGUF files of your own that it was made of stay.
"""


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo rm",
        usage="octavo rm [options] NAME [NAME ...]",
        description="Removes models from the cache; they are fetched or converted again when they are next used.",
        epilog=EXAMPLE,
    )
    add_json_flag(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Removes the models, if all are in the cache."""
    if not arguments.words:
        raise ConfigError("octavo rm takes the NAME of a model, as in: octavo rm smollm2-135m")
    models = cached_models()
    chosen = {model.folder: model for name in arguments.words for model in _called(name, models)}
    freed = sum(model.size for model in chosen.values())
    with json_output(arguments) as stream:
        for model in chosen.values():
            remove(model)
            if stream is None:
                print(f"removed {model.folder}")
        if stream is None:
            print(f"{readable_size(freed)} freed")
        else:
            write_line(stream, {"removed": [as_json(model) for model in chosen.values()], "freed_bytes": freed})
    return 0


def _called(name: str, models: list[CachedModel]) -> list[CachedModel]:
    """The models of that name, or the one whose folder has it."""
    matches = [model for model in models if name in (model.name, model.folder.name)]
    if not matches:
        names = list(dict.fromkeys(model.name for model in models))
        hint = did_you_mean(name, names, f"there is {', '.join(names) or 'none'}", cutoff=0.5)
        raise ModelNotFoundError(f"no model {name!r} is in the cache; {hint}")
    return matches
