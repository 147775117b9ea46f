"""Masks of grammars: where they begin and end, vocabularies of other sizes than the network's, copies, forcing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher
from tokenizers import decoders, models, pre_tokenizers

from octavo.core.request import Generate
from octavo.core.sampling_params import Grammar, SamplingParams
from octavo.grammar.matcher import GrammarError, GrammarTokenizer, compile_grammar
from octavo.kernels.sampling import mask_words
from octavo.sampling.logits_processors import CompiledGrammar, GrammarMask, GrammarMasks, RowError

WORDS = ["ab", "abc", "bc", '":"', '","', "true", "tr", "name", "12", " x"]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
#: Ids 0 and 1 are special; 1 ends an output.
TOKENS = ["<bos>", "<eos>", *LETTERS, *WORDS]
EOS = 1


def make_backend(extra: int = 0) -> tokenizers.Tokenizer:
    """Bytes and some words, whose merges are those of two letters."""
    vocab = {token: i for i, token in enumerate(TOKENS)}
    merges = []
    for word in WORDS:
        made = word[0]
        for letter in word[1:]:
            pair = (made.replace(" ", "Ġ"), letter)
            made += letter
            vocab.setdefault(made.replace(" ", "Ġ"), len(vocab))
            merges.append(pair)
    vocab = {token.replace(" ", "Ġ"): i for token, i in vocab.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges))))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", *(f"<extra {i}>" for i in range(extra))])
    return backend


BACKEND = make_backend()
SIZE = BACKEND.get_vocab_size()
REGEX = LLMatcher.grammar_from_regex
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


def compiled(source: str, vocab_size: int = SIZE, eos: tuple[int, ...] = (EOS,)) -> CompiledGrammar:
    tokenizer = GrammarTokenizer(BACKEND, vocab_size, eos)
    return CompiledGrammar(compile_grammar(source, tokenizer), tokenizer)


def mask_of(grammar: CompiledGrammar, begin_after: list[int] | None = None, **task: Any) -> GrammarMask:
    wanted = Generate(SamplingParams(max_tokens=None), 0, grammar=Grammar("key", "", begin_after or []), **task)
    return GrammarMask(grammar, wanted, 2)


def allowed(
    mask: GrammarMask, tokens: list[int], vocab_size: int = SIZE, others: list[int] | None = None
) -> set[int] | None:
    """The tokens allowed after a prompt of two tokens and these; None: all."""
    mask.advance(np.array([0, 0, *tokens], np.int32))
    if not mask.binds:
        return None
    masks = {}
    if others is not None:
        bits = np.zeros(32 * mask_words(vocab_size), bool)
        bits[others] = True
        masks[0] = np.packbits(bits, bitorder="little").view(np.uint32)
    assert GrammarMasks(vocab_size, 1).add_to(masks, {0: mask}) == {}
    assert masks[0].shape == (mask_words(vocab_size),)
    return set(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist())


def ids(text: str) -> list[int]:
    found: list[int] = BACKEND.encode(text, add_special_tokens=False).ids
    return found


def texts(tokens: set[int] | None) -> set[str]:
    assert tokens is not None
    return {str(BACKEND.id_to_token(token)) for token in tokens}


def test_the_end_is_allowed_exactly_where_the_grammar_may_end() -> None:
    mask = mask_of(compiled(REGEX("(ab)+c?")))
    assert texts(allowed(mask, [])) == {"a", "ab", "abc"}
    assert texts(allowed(mask, ids("ab"))) == {"a", "ab", "abc", "c", "<eos>"}
    assert texts(allowed(mask, ids("ab") + ids("abc"))) == {"<eos>"}


def test_all_tokens_that_end_the_models_outputs_are_allowed_there() -> None:
    mask = mask_of(compiled(REGEX("ab?"), eos=(EOS, 0)))
    assert texts(allowed(mask, ids("a"))) == {"b", "<eos>", "<bos>"}
    assert texts(allowed(mask_of(compiled(REGEX("a"), eos=(EOS, 0))), ids("a"))) == {"<eos>", "<bos>"}


def test_ignored_ends_are_allowed_where_nothing_else_is() -> None:
    mask = mask_of(compiled(REGEX("ab?")), ignored_eos_ids=[EOS])
    assert texts(allowed(mask, ids("a"))) == {"b"}
    assert texts(allowed(mask, ids("a") + ids("b"))) == {"<eos>"}
    assert texts(allowed(mask, [*ids("a"), *ids("b"), EOS, EOS])) == {"<eos>"}, "up to max_tokens"
    stops = mask_of(compiled(REGEX("ab?")), ignored_eos_ids=[EOS], stop_token_ids=[EOS])
    assert texts(allowed(stops, ids("a"))) == {"b", "<eos>"}, "it is a stop token of the request"


def test_other_masks_restrict_a_grammar_but_not_its_only_end() -> None:
    mask = mask_of(compiled(REGEX("a[bc]?")))
    assert texts(allowed(mask, ids("a"), others=ids("b"))) == {"b"}
    assert texts(allowed(mask, ids("a") + ids("b"), others=ids("b"))) == {"<eos>"}
    assert allowed(mask_of(compiled(REGEX("x"))), [], others=ids("b")) == set()


def test_it_begins_after_a_marker_wherever_the_tokens_are_cut() -> None:
    grammar, marker = compiled(REGEX("(ab)+")), ids("12") + ids("x")
    tokens = [*ids("x"), *ids("12"), *ids("12"), *ids("x"), *ids("12"), *ids("x")]
    for cut in range(4):
        mask = mask_of(grammar, marker)
        for length in range(cut, 4):
            assert allowed(mask, tokens[:length]) is None
        found = texts(allowed(mask, [*tokens[:4]]))
        assert found == {"ab"}, "the first occurrence counts"
    once = mask_of(grammar, marker)
    assert texts(allowed(once, [*tokens[:4], *ids("ab")])) == {"a", "ab", "<eos>"}, "rebuilt after a preemption"
    prompt = mask_of(grammar, [0, 0])
    assert allowed(prompt, []) is None, "the marker may not be in the prompt"


@pytest.mark.parametrize("vocab_size", [SIZE + 1, SIZE + 33, SIZE + 1000])
def test_ids_of_the_network_that_are_no_token_never_occur(vocab_size: int) -> None:
    mask = mask_of(compiled(REGEX("(?s).*"), vocab_size))
    found = allowed(mask, [], vocab_size)
    assert found is not None and max(found) < SIZE and len(found) > 150


def test_tokens_that_the_network_has_no_row_for_never_occur() -> None:
    size = len(TOKENS) - 1
    mask = mask_of(compiled(REGEX("( x|ab)"), size))
    found = allowed(mask, [], size)
    assert found is not None and max(found) < size and ids(" x")[0] >= size
    forced = mask_of(compiled(REGEX(" x"), size))
    assert forced.forced_tokens(np.array([0, 0], np.int32)) == []


def test_what_is_forced_is_what_the_masks_allow() -> None:
    """Along random outputs: a mask allows one token where tokens are forced, and that is the first of them."""
    grammar = compiled(JSON)
    rng = random.Random(4)
    seen = 0
    for _ in range(40):
        stepwise, jumping = mask_of(grammar), mask_of(grammar)
        tokens: list[int] = []
        while EOS not in tokens:
            forced = jumping.forced_tokens(np.array([0, 0, *tokens], np.int32))
            for token in forced:
                assert allowed(stepwise, tokens) == {token}
                tokens.append(token)
            seen += len(forced)
            if EOS in tokens:
                break
            choice = allowed(stepwise, tokens)
            assert choice == allowed(jumping, tokens) == allowed(mask_of(grammar), tokens) and choice
            tokens.append(rng.choice(sorted(choice)))
        text = BACKEND.decode(tokens)
        assert text.startswith('{"name":"') and text.endswith(("true}", "false}"))
    assert seen > 300


def test_copies_go_their_own_ways() -> None:
    mask = mask_of(compiled(REGEX("(ab|12)[a-z]{3}")))
    first = texts(allowed(mask, []))
    child = mask.fork()
    assert allowed(child, [*ids("12"), *ids("x")]) == allowed(mask_of(compiled(REGEX("(ab|12)[a-z]{3}"))), ids("12x"))
    assert texts(allowed(mask, [])) == first
    assert "x" in texts(allowed(mask, ids("ab")))


def test_tokens_against_the_grammar_are_an_error_that_changes_nothing() -> None:
    mask = mask_of(compiled(REGEX("(ab)+")))
    draft = mask.fork()
    with pytest.raises(RowError, match="left its grammar"):
        draft.advance(np.array([0, 0, *ids("12")], np.int32))
    assert texts(allowed(mask, ids("ab"))) == {"a", "ab", "<eos>"}


def test_many_rows_on_several_threads_have_the_masks_that_they_have_alone() -> None:
    grammar = compiled(JSON)
    rng = random.Random(1)
    rows = []
    for _ in range(40):
        mask, tokens = mask_of(grammar), list[int]()
        for _ in range(rng.randrange(12)):
            choice = allowed(mask, tokens)
            assert choice
            if choice == {EOS}:
                break
            tokens.append(rng.choice(sorted(choice - {EOS})))
        rows.append((mask, tokens))
    together: dict[int, Any] = {}
    assert GrammarMasks(SIZE, 2).add_to(together, {3 * i: mask for i, (mask, _) in enumerate(rows)}) == {}
    for i, (mask, _) in enumerate(rows):
        alone: dict[int, Any] = {}
        GrammarMasks(SIZE, 1).add_to(alone, {0: mask})
        assert (together[3 * i] == alone[0]).all()


def test_a_grammar_that_is_none_is_refused() -> None:
    with pytest.raises(GrammarError, match="unclosed group"):
        compiled(REGEX("(a"))


def test_no_more_is_forced_than_the_output_may_have() -> None:
    wanted = Generate(SamplingParams(max_tokens=5), 0, grammar=Grammar("key", ""))
    mask = GrammarMask(compiled(REGEX("12,12,12,12")), wanted, 2)
    assert len(mask.forced_tokens(np.array([0, 0, *ids("12")], np.int32))) == 4
