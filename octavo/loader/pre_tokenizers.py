r"""How each family of byte-level BPE (Radford et al. 2019) cuts a text into the pieces in which it merges.

The expressions are those of the families' published tokenizer.json, under the names that GGUF files give them
(``tokenizer.ggml.pre``). ``\p{N}`` as a cut of its own takes digits one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_SEED = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"


def _by_case(digits: str, ending: str = "") -> str:
    """Words that also end where a capital follows a small letter; ``ending`` may stand after each."""
    upper, lower, before = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _characters(ranges: str) -> str:
    """The inside of a character class from hexadecimal code points and ranges of them."""
    return "".join("-".join(rf"\x{{{end}}}" for end in entry.split("-")) for entry in ranges.split())


_HAN = f"[{_characters('4e00-9fa5 800-4e00 ac00-d7ff')}]+"
_CASED = _characters(
    "b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 3a3-3f5 "
    "3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a "
    "1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 "
    "212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d "
    "a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_DEEPSEEK_LETTERS = rf"\s?[A-Za-z{_CASED}]+"
_DEEPSEEK_MARKS = rf"\s?[!-/:-~{_characters('ff01-ff0f ff1a-ff5e 2018-201f 3000-3002')}]+"


@dataclass(frozen=True)
class PreTokenizer:
    """What a family does to a text before its merges."""

    #: Regular expressions: matches, and what is between them, are pieces; each cuts the pieces of the one before.
    cuts: tuple[str, ...] = (_GPT2,)
    #: Whether characters are composed first (Unicode's NFC).
    composed: bool = False
    #: Whether a piece that is a token is taken as one even if merges do not lead to it.
    ignore_merges: bool = False
    #: Whether a beginning token is added unless the checkpoint says otherwise.
    adds_bos: bool = False
    #: As ``cuts``, applied to the characters that stand for the bytes.
    byte_cuts: tuple[str, ...] = ()

    def attach(self, tokenizer: Tokenizer, *, prefix_space: bool = False) -> None:
        """Sets normalizer, pre-tokenizer and decoder; ``prefix_space``: a text begins with a space if it has none."""
        steps = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in self.cuts]
        bytes_of_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        within = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in self.byte_cuts]
        normal: list[Any] = [normalizers.NFC()] if self.composed else []
        if prefix_space:
            normal += [normalizers.Prepend(" "), normalizers.Replace(Regex(r"\A  "), " ")]
        if normal:
            tokenizer.normalizer = normalizers.Sequence(normal)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_of_pieces, *within])
        tokenizer.decoder = decoders.ByteLevel()


_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_O200K = PreTokenizer((_by_case(r"\p{N}{1,3}", _CONTRACTION + "?"),))
_QWEN = PreTokenizer((_QWEN2,), composed=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jais", "exaone4"), PreTokenizer()),
    **dict.fromkeys(("gpt-neox", "olmo", "mpt"), PreTokenizer(composed=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _BY_DIGIT),
    "command-r": PreTokenizer(_BY_DIGIT.cuts, composed=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN),
    "qwen35": PreTokenizer((_QWEN35,), composed=True),
    "seed-coder": PreTokenizer((_SEED,)),
    "tekken": PreTokenizer((_by_case(r"\p{N}"),), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _O200K),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^`|~]+", _GPT2), byte_cuts=(r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "deepseek-llm": PreTokenizer((r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_MARKS, r"\s+$", _HAN, r"\p{N}")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", f"[{_characters('4e00-9fa5 3040-309f 30a0-30ff')}]+", _DEEPSEEK_V3)),
}
