"""Names that flags have in other engines: translated where a command has the flag, or answered with what to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

#: llama.cpp's, vLLM's and others' names -> flags here, of which a command's first is meant. Words of a command line are
#: translated before they are parsed, and only whole words, so that a mistyped ``-max-tokens`` is not ``-m``.
OTHER_FLAGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("-m", "-hf", "-hfr", "--hf-repo"), ("--model",)),
    "-p": ("--prompt", "--input-len"),  # of llama-bench: tokens of a prompt
    **dict.fromkeys(("-n", "--predict", "--n-predict", "--num-predict"), ("--max-tokens", "--output-len")),
    **dict.fromkeys(("--max-new-tokens", "--num-tokens"), ("--max-tokens",)),
    **dict.fromkeys(("-c", "--ctx-size", "--num-ctx", "--context-length", "--max-seq-len"), ("--max-model-len",)),
    **dict.fromkeys(("-t", "--threads"), ("--num-threads",)),
    **dict.fromkeys(("-np", "--parallel"), ("--max-num-seqs",)),
    **dict.fromkeys(("-s", "--random-seed"), ("--seed",)),
    **dict.fromkeys(("-r", "--reverse-prompt"), ("--stop",)),
    **dict.fromkeys(("-a", "--alias"), ("--served-model-name",)),
    **dict.fromkeys(("-sys", "--system-prompt"), ("--system",)),
    "--temp": ("--temperature",),
    "--repeat-penalty": ("--repetition-penalty",),
    "--grammar-file": ("--grammar",),
    "--chat-template-file": ("--chat-template",),
    "--ssl-certfile": ("--tls-cert",),
    "--ssl-keyfile": ("--tls-key",),
}
#: What a value of another engine's flag is here.
_OTHER_VALUES: dict[str, Mapping[str, str]] = {
    "--max-tokens": {"-1": "none", "-2": "none"},
    "--max-model-len": {"0": "none"},
    "--seed": {"-1": "none"},
    "--num-threads": {"-1": "none"},
}
#: Flags of other engines that are none here, with what to do instead.
NO_COUNTERPART: dict[str, str] = {
    **dict.fromkeys(
        ("-ngl", "--gpu-layers", "--n-gpu-layers"), "a model is on one device as a whole: --device cpu, --device cuda"
    ),
    **dict.fromkeys(("-fa", "--flash-attn"), "attention is always computed block by block: leave it out"),
    **dict.fromkeys(("--mlock", "--mmap", "--no-mmap"), "weights are read into memory in any case: leave it out"),
    **dict.fromkeys(
        ("-cnv", "--conversation", "-i", "--interactive"),
        "'octavo chat MODEL' is a conversation, 'octavo generate --chat' passes prompts through the chat template",
    ),
    **dict.fromkeys(
        ("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), "--kv-cache-dtype int8 has keys and values in 8 bits"
    ),
    **dict.fromkeys(("-f", "--file"), "--input FILE takes a prompt from each line of a file"),
    "-j": "--json-schema FILE takes the schema from a file",
}


def own_flags(argv: Sequence[str], known: Collection[str]) -> list[str]:
    """The words of a command line with flags of ``OTHER_FLAGS`` by the names in ``known``, the command's flags.

    Words that the command knows itself, and those after ``--``, stay as they are.
    """
    words: list[str] = []
    values: Mapping[str, str] = {}  # of the flag before
    for number, word in enumerate(argv):
        if word == "--":
            return [*words, *argv[number:]]
        name, equals, value = word.partition("=")
        ours = next((flag for flag in OTHER_FLAGS.get(name, ()) if flag in known), None)
        if name in known or ours is None:
            words.append(values.get(word, word))
            values = {}
            continue
        values = _OTHER_VALUES.get(ours, {})
        words.append(f"{ours}={values.get(value, value)}" if equals else ours)
        values = {} if equals else values
    return words
