"""Entries of the tables of GGUF tensors, and the groups of them that architectures share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

#: The order of a file's rows, where transformers has another one. "interleaved": the rows of the two halves of each
#: head take turns. "qkv": all queries, then all keys, then all values; transformers has them by KV head.
RowOrder = Literal["interleaved", "qkv"]


@dataclass(frozen=True)
class Entry:
    """A tensor, by its names in the file and in transformers without the prefix of its layer."""

    source: str
    #: With ``{e}``: the file has the matrices of all experts in one tensor, transformers one for each expert.
    name: str
    #: Rows and columns in the file: sums of names of ``Keys.sizes`` or of the configuration, with factors ("Q+2K E").
    shape: str
    order: RowOrder | None = None
    #: What was added to the values, such as 1 to Gemma's norms.
    added: float = 0.0
    #: Whether transformers has rows as columns.
    transposed: bool = False
    #: Key of the configuration or of ``Keys.traits`` that is true where there is such a tensor, or false after "!";
    #: None: there always is.
    when: str | None = None
    #: Another tensor and its shape, of which this one is made too: "attn_v_b" beside "attn_k_b" of latent attention.
    beside: tuple[str, str] | None = None


def matrix(
    source: str,
    name: str,
    shape: str,
    *,
    bias: bool | str = False,
    order: RowOrder | None = None,
    transposed: bool = False,
    when: str | None = None,
) -> Iterator[Entry]:
    """A weight and, if ``bias`` is true, its bias; or, if the configuration has a true value of that name."""
    yield Entry(f"{source}.weight", f"{name}.weight", shape, order, transposed=transposed, when=when)
    if bias:
        when = bias if isinstance(bias, str) else None
        yield Entry(f"{source}.bias", f"{name}.bias", shape.split()[0], order, when=when)


def rms_norms(*names: tuple[str, str], size: str = "E", added: float = 0.0) -> Iterator[Entry]:
    """The weights of norms, given as (name in the file, name in transformers)."""
    for source, name in names:
        yield Entry(f"{source}.weight", f"{name}.weight", size, added=added)


def layer_norms(*names: tuple[str, str], when: str | None = None) -> Iterator[Entry]:
    """The weights and biases of norms."""
    for source, name in names:
        for kind in ("weight", "bias"):
            yield Entry(f"{source}.{kind}", f"{name}.{kind}", "E", when=when)


def attention(order: RowOrder | None = None, bias: bool | str = False, out_bias: bool | str = False) -> Iterator[Entry]:
    """Query, key, value and output projections under the names of Llama."""
    yield from matrix("attn_q", "self_attn.q_proj", "Q E", order=order, bias=bias)
    yield from matrix("attn_k", "self_attn.k_proj", "K E", order=order, bias=bias)
    yield from matrix("attn_v", "self_attn.v_proj", "K E", bias=bias)
    yield from matrix("attn_output", "self_attn.o_proj", "E Q", bias=out_bias)


def gated_mlp(
    name: str = "mlp", inner: str = "F", suffix: str = "", bias: bool | str = False, when: str | None = None
) -> Iterator[Entry]:
    """Gate, up and down projections under the names of Llama."""
    yield from matrix(f"ffn_gate{suffix}", f"{name}.gate_proj", f"{inner} E", bias=bias, when=when)
    yield from matrix(f"ffn_up{suffix}", f"{name}.up_proj", f"{inner} E", bias=bias, when=when)
    yield from matrix(f"ffn_down{suffix}", f"{name}.down_proj", f"E {inner}", bias=bias, when=when)


def experts(
    inner: str,
    name: str = "mlp",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    when: str | None = None,
) -> Iterator[Entry]:
    """The router and the matrices of all experts."""
    gate, up, down = (f"{name}.experts.{{e}}.{part}" for part in parts)
    yield from matrix("ffn_gate_inp", f"{name}.gate", "X E", when=when)
    yield from matrix("ffn_gate_exps", gate, f"X {inner} E", when=when)
    yield from matrix("ffn_up_exps", up, f"X {inner} E", when=when)
    yield from matrix("ffn_down_exps", down, f"X E {inner}", when=when)


NORMS = (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"))
HEAD_NORMS = (("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm"))


def ends(*, added: float = 0.0) -> tuple[Entry, ...]:
    """Embedding, last norm and head under the names of Llama."""
    return (
        *matrix("token_embd", "model.embed_tokens", "V E"),
        *rms_norms(("output_norm", "model.norm"), added=added),
        *head(),
    )


def head(name: str = "lm_head") -> Iterator[Entry]:
    """The head, where it is not the embedding."""
    yield Entry("output.weight", f"{name}.weight", "V E", when="!tie_word_embeddings")
