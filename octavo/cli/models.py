"""``octavo pull``, ``octavo list`` and ``octavo rm``: downloads, lists and removes models."""

from __future__ import annotations

import sys
from typing import Any

from octavo.cli.parsing import (
    Arguments,
    Command,
    Parser,
    add_json_flag,
    json_output,
    refuse_words,
    write_json,
    write_line,
)
from octavo.core.errors import ConfigError, ModelNotFoundError, did_you_mean
from octavo.loader import files, hub
from octavo.loader.builtin import BUILTIN
from octavo.loader.files import CachedModel, cache_dir, readable_size
from octavo.loader.local_models import all_models, find_local_model

_PULL_EXAMPLE = """\
examples:
  octavo pull smollm2-135m
  octavo pull HuggingFaceTB/SmolLM2-360M-Instruct
  octavo pull unsloth/Qwen3-0.6B-GGUF:Q4_K_M

built-in models:
""" + "".join(f"  {model.name:<17} {model.description}\n" for model in BUILTIN.values())


def _pull_parser() -> Parser:
    return Parser(
        prog="octavo pull",
        usage="octavo pull [options] NAME",
        description="Downloads a model, unless it is cached, and prints its folder, or the GGUF file of a hub model.\n"
        "An interrupted download is continued.",
        epilog=_PULL_EXAMPLE,
    )


def pull_model(arguments: Arguments) -> int:
    if len(arguments.words) != 1:
        raise ConfigError("octavo pull takes one NAME, as in: octavo pull smollm2-135m")
    from octavo.loader.resolve import gguf_source, hub_model, resolve_model

    name = arguments.words[0]
    folder = resolve_model(name)
    print((gguf_source(name) if hub_model(name) else None) or folder)
    if name in BUILTIN and BUILTIN[name].is_base:
        print(f"octavo: {name} is a base model: it continues texts and answers no questions", file=sys.stderr)
    return 0


_LIST_EXAMPLE = """\
examples:
  octavo list
  octavo list --json -

OCTAVO_CACHE holds built-in models, and configuration and tokenizer of GGUF files. Models of the hub (kind "hub") are in
the cache of huggingface_hub (HF_HUB_CACHE), with those that other programs have fetched. Models of Ollama
(OLLAMA_MODELS) and LM Studio are listed and served by their names, and only read.
"""


def _list_parser() -> Parser:
    parser = Parser(
        prog="octavo list",
        usage="octavo list [options]",
        description="Lists the models in the cache: name, kind, size and folder. 'octavo rm NAME' removes one.",
        epilog=_LIST_EXAMPLE,
    )
    add_json_flag(parser)
    return parser


def list_models(arguments: Arguments) -> int:
    refuse_words(arguments)
    models = all_models()
    if arguments.json is not None:
        write_json(arguments.json, {"models": [_as_json(model) for model in models]})
        return 0
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        kind = f"{model.kind} ({model.dtype})" if model.dtype else model.kind
        kind += ", base model" if _is_base(model) else ", images" if model.projector else ""
        print(f"{model.name:<{width}}  {kind:<32}  {readable_size(model.size):>10}  {model.folder}")
    models = [model for model in models if model.kind not in _OTHERS]
    total = readable_size(sum(model.size for model in models))
    places = " and ".join(
        str(place) for place in (cache_dir(), *([hub.hub_cache()] if any(map(_is_of_hub, models)) else []))
    )
    print(f"{total} in {len(models)} folders of {places}")
    return 0


#: Kinds of models that other programs own, and these programs.
_OTHERS = {"ollama": "Ollama", "lmstudio": "LM Studio"}


def _is_of_hub(model: CachedModel) -> bool:
    return model.kind == "hub"


def _is_base(model: CachedModel) -> bool:
    return model.name in BUILTIN and BUILTIN[model.name].is_base


def _as_json(model: CachedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "kind": model.kind,
        "dtype": model.dtype,
        "base_model": _is_base(model),
        "size_bytes": model.size,
        **({"projector": model.projector} if model.projector else {}),
        "folder": str(model.folder),
    }


_RM_EXAMPLE = """\
examples:
  octavo rm smollm2-135m
  octavo rm smollm2-135m-float32-08666b006d51fc7d
  octavo rm unsloth/Qwen3-0.6B-GGUF:Q4_K_M

NAME is a model of 'octavo list', with all its folders, or one folder, or a repository of the hub with all its models.
Only listed models can be removed; your own GGUF files that they were converted from stay, and so do models of Ollama
and LM Studio.
"""


def _rm_parser() -> Parser:
    parser = Parser(
        prog="octavo rm",
        usage="octavo rm [options] NAME [NAME ...]",
        description="Removes models from the cache; they are fetched or converted again when they are next used.",
        epilog=_RM_EXAMPLE,
    )
    add_json_flag(parser)
    return parser


def remove_models(arguments: Arguments) -> int:
    """Removes the models if all are in the cache, else none."""
    if not arguments.words:
        raise ConfigError("octavo rm takes the NAME of a model, as in: octavo rm smollm2-135m")
    models = sorted([*files.cached_models(), *hub.cached_models()], key=lambda model: model.name)
    chosen = {(model.folder, model.name): model for name in arguments.words for model in _matches(name, models)}
    freed = sum(model.size for model in chosen.values())
    with json_output(arguments) as stream:
        for model in chosen.values():
            (hub if _is_of_hub(model) else files).remove(model)
            if stream is None:
                print(f"removed {f'{model.name} from ' if _is_of_hub(model) else ''}{model.folder}")
        if stream is None:
            print(f"{readable_size(freed)} freed")
        else:
            write_line(stream, {"removed": [_as_json(model) for model in chosen.values()], "freed_bytes": freed})
    return 0


def _matches(name: str, models: list[CachedModel]) -> list[CachedModel]:
    """The models of this name, or the model in the folder of this name."""
    matches = [model for model in models if name in (model.name, model.folder.name)]
    if (wanted := hub.parse_hub_model(name)) is not None:
        matches = [model for model in models if _is_of_hub(model) and hub.is_meant(wanted, model)]
        # What was made of a GGUF file goes with it.
        from octavo.loader.resolve import converted_folder

        made = {
            converted_folder(model.folder / model.files[0], projector=projector)
            for model in matches
            if ":" in model.name
            for projector in (None, model.folder / model.projector if model.projector else None)
        }
        matches += [model for model in models if model.folder in made]
    if not matches:
        if (local := find_local_model(name)) is not None:
            raise ModelNotFoundError(
                f"{name!r} is a model of {_OTHERS[local.source]}, which is only read: remove it there"
            )
        names = list(dict.fromkeys(model.name for model in models))
        hint = did_you_mean(name, names, f"there is {', '.join(names) or 'none'}", cutoff=0.5)
        raise ModelNotFoundError(f"no model {name!r} is in the cache; {hint}")
    return matches


COMMANDS = {
    "pull": Command(_pull_parser, pull_model),
    "list": Command(_list_parser, list_models),
    "rm": Command(_rm_parser, remove_models),
}
