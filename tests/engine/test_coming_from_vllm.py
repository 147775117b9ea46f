"""Scripts as they are written for vLLM: each works after its import is changed, or is refused with the reason.

``docs/coming-from.md`` lists the differences.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo import LLM, OctavoError

OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 64, "block_size": 4, "num_threads": 1}

#: Programs that make an engine of their own, in a few lines each; ``load`` is ``LLM`` with few blocks.
LOADING = [
    "load(dtype='float')",
    "load(dtype=torch.float32)",
    "load(dtype='auto', tokenizer_mode='auto', trust_remote_code=True, tensor_parallel_size=1, seed=None)",
    "load(dtype='bfloat16', quantization=None, revision=None, tokenizer_revision=None, download_dir=None)",
    "load(disable_log_stats=True, max_seq_len_to_capture=8192, use_v2_block_manager=True, enforce_eager=True)",
    "load(enable_lora=False, task='generate', pipeline_parallel_size=1, distributed_executor_backend=None)",
    "load(runner='generate', convert='auto', max_num_seqs=None, max_num_batched_tokens=None, block_size=None)",
    """
    llm = load(skip_tokenizer_init=True)
    out = llm.generate({"prompt_token_ids": [70, 71, 72]}, SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0]
    assert (out.text, len(out.token_ids)) == ("", 4)
    """,
    "llm = load(tokenizer=model)\nassert llm.get_tokenizer().decode(llm.get_tokenizer().encode('abc')) == 'abc'",
]

#: Programs that use ``llm``.
WORKING = [
    # prompts
    "assert len(llm.generate('x')) == len(llm.generate(['x'])) == 1",
    "assert llm.generate(TextPrompt(prompt='x'), greedy)[0].prompt == 'x'",
    "assert llm.generate(TokensPrompt(prompt_token_ids=[70]), greedy)[0].prompt_token_ids == [70]",
    """
    output = llm.generate({"prompt_token_ids": [70, 71], "prompt": "as it was"}, greedy)[0]
    assert (output.prompt, output.prompt_token_ids) == ("as it was", [70, 71])
    """,
    "llm.generate({'prompt': 'x', 'multi_modal_data': None, 'mm_processor_kwargs': None}, greedy)",
    "llm.generate({'prompt': 'x', 'cache_salt': 'a tenant'}, greedy)",
    "assert len(llm.generate(['a', 'b'], [greedy, greedy.clone()], lora_request=None, priority=[0, 0])) == 2",
    "llm.generate('x', greedy, use_tqdm=False, lora_request=None, priority=None, tokenization_kwargs=None)",
    """
    from tqdm import tqdm
    bars = []
    def bar(*args, **options):
        bars.append(tqdm(*args, **options, disable=True))
        return bars[-1]
    llm.generate(["x", "y"], greedy, use_tqdm=bar)
    assert bars[0].total == 2
    """,
    # sampling parameters
    "SamplingParams(structured_outputs={'regex': 'a'})",
    "SamplingParams(structured_outputs=StructuredOutputsParams(choice=['a', 'b']))",
    "SamplingParams(guided_decoding=None, structured_outputs=None, extra_args=None, flat_logprobs=False)",
    "SamplingParams(spaces_between_special_tokens=True, output_kind=RequestOutputKind.FINAL_ONLY)",
    """
    params = SamplingParams(stop=["a"], logit_bias={5: 1.0}, logits_processors=[lambda ids, logits: logits])
    other = params.clone()
    other.stop.append("b")
    assert (params.stop, other.stop, other.logit_bias) == (["a"], ["a", "b"], {5: 1.0})
    assert other.logits_processors[0] is params.logits_processors[0]
    """,
    """
    ids = llm.get_tokenizer().encode("abcdef")
    params = SamplingParams(max_tokens=2, truncate_prompt_tokens=2)
    assert llm.generate("abcdef", params)[0].prompt_token_ids == ids[-2:]
    params = SamplingParams(max_tokens=3, ignore_eos=True, truncate_prompt_tokens=-1)
    output = llm.generate("abcdef" * 100, params)[0]
    assert len(output.prompt_token_ids) == 256 - 3 and len(output.outputs[0].token_ids) == 3
    """,
    "assert llm.generate('x', SamplingParams(seed=1, n=2, best_of=3))[0].outputs[1].index == 1",
    """
    def ban(token_ids, logits):
        logits[:100] = float("-inf")
        return logits
    out = llm.generate("x", SamplingParams(max_tokens=8, ignore_eos=True, logits_processors=[ban]))[0].outputs[0]
    assert min(out.token_ids) >= 100
    """,
    # calls of older versions
    """
    ids = [[70, 71], [72], [73, 74]]
    plain = llm.generate([TokensPrompt(prompt_token_ids=each) for each in ids], greedy)
    for outputs in (
        llm.generate(prompt_token_ids=ids, sampling_params=greedy),
        llm.generate(None, greedy, prompt_token_ids=ids),
        llm.generate(prompt_token_ids=ids, sampling_params=[greedy] * 3, use_tqdm=False),
        llm.generate(["a", "b", "c"], greedy, prompt_token_ids=ids),
        [llm.generate(prompt_token_ids=each, sampling_params=greedy)[0] for each in ids],
    ):
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
        assert [o.prompt_token_ids for o in outputs] == ids
    assert llm.generate(["a", "b", "c"], greedy, prompt_token_ids=ids)[2].prompt == "c"
    """,
    """
    for guided, matching in (
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a" "b"', "guided_decoding_backend": "outlines"}, "ab"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"guided_json": '{"type": "boolean"}', "guided_whitespace_pattern": None}, "true|false"),
    ):
        params = SamplingParams(seed=1, max_tokens=20)
        for given in (params, [params, params]):
            for output in llm.generate(["x", "y"], given, guided_options_request=guided):
                assert re.fullmatch(matching, output.outputs[0].text)
        assert params.structured_outputs is None
    """,
    """
    params = SamplingParams(seed=1, max_tokens=20, guided_decoding={"regex": "[0-9]{3}", "backend": "xgrammar"})
    assert params.structured_outputs.regex == "[0-9]{3}" and params.guided_decoding is None
    assert llm.generate("x", params)[0].outputs[0].text.isdigit()
    """,
    """
    old = SamplingParams(
        n=2, best_of=4, use_beam_search=True, temperature=0, length_penalty=0.5, early_stopping=True, max_tokens=6
    )
    new = BeamSearchParams(beam_width=4, length_penalty=0.5, early_stopping=True, max_tokens=6)
    [output], [expected] = llm.generate(["ab"], old), llm.generate(["ab"], new)
    assert output.outputs == expected.outputs[:2] and len(expected.outputs) == 4
    engine = llm.llm_engine
    engine.add_request("beams", "ab", old)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs == output.outputs
    widest = llm.generate("ab", SamplingParams(n=3, use_beam_search=True, temperature=0, top_p=1, top_k=-1))[0]
    assert len(widest.outputs) == 3 and [o.index for o in widest.outputs] == [0, 1, 2]
    """,
    "assert BeamSearchParams(beam_width=2, include_stop_str_in_output=False) == BeamSearchParams(beam_width=2)",
    """
    engine = llm.llm_engine
    for name in "abcd":
        engine.add_request(name, "x", SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    assert engine.abort_request("a").outputs[0].finish_reason == "abort"
    assert [o and o.request_id for o in engine.abort_request(["b", "nothing", "c"])] == ["b", None, "c"]
    assert engine.abort_request("a") is None and engine.has_unfinished_requests()
    assert [o.finished for o in engine.abort_request(name for name in "d")] == [True]
    assert not engine.has_unfinished_requests()
    """,
    "assert llm.chat('hi', greedy, False)[0].finished",
    "assert SamplingParams.from_optional(n=None, top_k=5, max_tokens=None) == SamplingParams(top_k=5, max_tokens=None)",
    """
    try:
        llm.generate("x", priorty=1)
    except TypeError as error:
        assert isinstance(error, ValueError) and "priority" in str(error)
    """,
    # outputs
    """
    output = llm.generate("abc", SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1))[0]
    completion = output.outputs[0]
    chosen = [entry[token] for entry, token in zip(completion.logprobs, completion.token_ids)]
    assert abs(completion.cumulative_logprob - sum(entry.logprob for entry in chosen)) < 1e-9
    assert all(isinstance(entry, Logprob) and entry.rank >= 1 for entry in chosen)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[1][output.prompt_token_ids[1]].decoded_token == "b"
    assert output.num_cached_tokens == output.metrics.num_cached_tokens
    assert output.finished and completion.finish_reason == "length" and completion.stop_reason is None
    """,
    """
    beams = llm.beam_search(
        [{"prompt": "ab"}], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True, temperature=0.0)
    )[0].sequences
    assert len(beams) == 3 and all(len(beam.tokens) == 6 for beam in beams)
    assert beams[0].text.startswith("ab") and beams[0].cum_logprob >= beams[1].cum_logprob
    """,
    """
    beam = llm.beam_search({"prompt_token_ids": [67, 68]}, BeamSearchParams(beam_width=2, max_tokens=1))[0].sequences[0]
    assert beam.tokens[:2] == [67, 68] and beam.text.startswith(llm.get_tokenizer().decode([67, 68]))
    """,
    # chat
    "assert llm.chat('hi', greedy)[0].prompt_token_ids == llm.chat([{'role': 'user', 'content': 'hi'}], greedy)[0]"
    ".prompt_token_ids",
    "assert len(llm.chat(['hi', [{'role': 'user', 'content': 'ho'}]], greedy)) == 2",
    "assert len(llm.chat({'role': 'user', 'content': 'ho'}, greedy)) == 1",
    "llm.chat('hi', greedy, lora_request=None, chat_template_content_format='auto', mm_processor_kwargs=None)",
    """
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if think %}?{% endif %}"
    output = llm.chat("hi", greedy, chat_template=template, chat_template_kwargs={"think": True})[0]
    assert output.prompt_token_ids == llm.get_tokenizer().encode("hi?")
    """,
    """
    messages = [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "The longest "}]
    output = llm.chat(messages, greedy, add_generation_prompt=False, continue_final_message=True)[0]
    assert llm.get_tokenizer().decode(output.prompt_token_ids).endswith("assistant: The longest ")
    """,
    """
    text = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("user: hi") and text.endswith("assistant: ")
    """,
    """
    tokenizer, messages = llm.get_tokenizer(), [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    output = llm.chat(messages, greedy)[0]
    assert output.prompt == text
    assert tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True) == output.prompt_token_ids
    asked = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(messages, **asked).input_ids == output.prompt_token_ids
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == output.prompt_token_ids
    """,
    """
    tokenizer = llm.get_tokenizer()
    encoding = tokenizer(["ab", "abc"])
    assert encoding.input_ids == [tokenizer.encode("ab"), tokenizer.encode("abc")]
    assert [len(mask) for mask in encoding.attention_mask] == [len(ids) for ids in encoding.input_ids]
    assert tokenizer("abc", truncation=True, max_length=1).input_ids == tokenizer.encode("abc")[:1]
    assert tokenizer.batch_decode(encoding.input_ids) == ["ab", "abc"]
    vocabulary = tokenizer.get_vocab()
    assert vocabulary["<eos>"] == 1 and len(vocabulary) == len(tokenizer)
    assert [tokenizer.convert_ids_to_tokens(i) for i in (0, 1)] == tokenizer.convert_ids_to_tokens([0, 1])
    assert tokenizer.tokenize("<eos>a")[0] == "<eos>" and {0, 1} <= set(tokenizer.all_special_ids)
    assert "<eos>" in tokenizer.all_special_tokens and tokenizer.pad_token_id is None
    """,
    """
    llm = load(max_logprobs=-1)
    output = llm.generate("abc", SamplingParams(max_tokens=2, ignore_eos=True, logprobs=-1, prompt_logprobs=-1))[0]
    whole = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]
    size = len(whole[0])
    assert size >= len(llm.get_tokenizer()) and all(len(position) == size for position in whole)
    assert all(abs(sum(math.exp(entry.logprob) for entry in position.values()) - 1) < 1e-4 for position in whole)
    assert sorted(entry.rank for entry in whole[0].values()) == list(range(1, size + 1))
    """,
    "t = llm.get_tokenizer()\nassert (t.eos_token, t.eos_token_id, t.bos_token_id) == ('<eos>', 1, 0)",
    "assert llm.get_tokenizer().convert_tokens_to_ids(['<bos>', '<eos>']) == [0, 1]",
    # the engine
    """
    llm.generate("once", greedy)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert isinstance(metrics["octavo_decode_tokens"], Counter) and metrics["octavo_decode_tokens"].value > 0
    assert isinstance(metrics["octavo_requests_running"], Gauge) and metrics["octavo_requests_running"].value == 0
    """,
    """
    llm.generate("a prompt of several blocks", greedy)
    assert llm.llm_engine.stats().blocks_cached > 0
    assert llm.reset_prefix_cache()
    assert llm.llm_engine.stats().blocks_cached == 0
    """,
    """
    engine = llm.llm_engine
    whole = llm.generate("x", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1))[0].outputs[0]
    for kind in (None, RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, output_kind=kind)
        engine.add_request("0", "x", params)
        seen = []
        while engine.has_unfinished_requests():
            seen += [output.outputs[0] for output in engine.step()]
        if kind is RequestOutputKind.DELTA:
            assert [len(part.token_ids) for part in seen] == [1] * 4
            assert "".join(part.text for part in seen) == whole.text
        else:
            assert [len(part.token_ids) for part in seen] == [1, 2, 3, 4]
            assert seen[-1] == whole and all(seen[-1].text.startswith(part.text) for part in seen)
    """,
    """
    engine = llm.llm_engine
    engine.add_request("0", "x", SamplingParams(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs) == 1
    """,
]

#: Programs that are refused, and what the message says.
REFUSED = [
    ("load(code_revision='main')", "code_revision must be None, not 'main': no code of a checkpoint is run"),
    ("load(decode_context_parallel_size=2)", "decode_context_parallel_size must be 1, not 2"),
    ("load(task='classify')", "task 'classify' is nothing that LlamaForCausalLM does"),
    ("load(runner='draft')", "runner must be .*not 'draft'"),
    ("load(speculative_config={'method': 'medusa'})", "speculative_config: method 'medusa'.*ngram, suffix"),
    ("load(speculative_model='m')", "speculative_model must be None.*speculative_config"),
    ("load(cpu_offload_gb=4)", "cpu_offload_gb must be 0, not 4"),
    ("load(hf_overrides='rope')", "hf_overrides: .*it must be a mapping"),
    ("load(hf_overrides={'max_position_embeddings': 0})", "max_position_embeddings"),
    ("load(tokenizer_mode='mistral')", "tokenizer_mode must be"),
    ("load(no_such_option=1)", "unknown option 'no_such_option'"),
    ("load(dtype='float64')", "dtype"),
    ("load(skip_tokenizer_init=True, tokenizer=model)", "skip_tokenizer_init"),
    ("load(skip_tokenizer_init=True).generate('text')", "skip_tokenizer_init.*prompt as token ids"),
    ("load(skip_tokenizer_init=True).chat('text')", "skip_tokenizer_init"),
    ("load(skip_tokenizer_init=True).generate([5], SamplingParams(stop='x'))", "skip_tokenizer_init.*stop"),
    ("load(skip_tokenizer_init=True).generate([5], SamplingParams(bad_words=['x']))", "skip_tokenizer_init"),
    ("llm.generate({'prompt': 'x', 'multi_modal_data': {'image': 1}})", "multi_modal_data.*text alone"),
    ("llm.generate({'prompt_embeds': [[0.0]]})", "prompt_embeds"),
    ("llm.generate({'prompt': 'x', 'promt': 'y'})", "'promt'.*known: .*prompt"),
    ("llm.generate({'encoder_prompt': 'x', 'decoder_prompt': 'y'})", "'encoder_prompt'"),
    ("llm.generate('x', lora_request=object())", "lora_request must be a LoRARequest"),
    ("llm.generate(['x'], lora_request=[LoRARequest('a', 1, 'b')] * 2)", "lora_request must be .* not 2 of them"),
    ("llm.generate('x', lora_request=LoRARequest('a', 1, 'b'))", "enable_lora=True"),
    ("llm.chat('x', lora_request=LoRARequest('a', 1, 'b'))", "enable_lora=True"),
    ("llm.generate(['a', 'b'], prompt_token_ids=[[5, 6]])", "prompts must be .*each of the 1, not 2 of them"),
    ("llm.generate(prompt_token_ids=7)", "prompt_token_ids must be token ids or a list of them, not 7"),
    ("llm.generate()", "prompts must be"),
    ("llm.chat('x', prompt_token_ids=[5])", "prompt_token_ids must be None.*TokensPrompt"),
    ("llm.generate('x', guided_options_request={'guided_regexp': 'a'})", "unknown field 'guided_regexp'.*guided_regex"),
    ("llm.generate('x', guided_options_request={'guided_regex': 'a', 'guided_grammar': 'b'})", "exactly one of"),
    ("llm.generate('x', guided_options_request='a')", "guided_options_request has the unknown field 'str'"),
    (
        "llm.generate('x', SamplingParams(structured_outputs={'regex': 'a'}), "
        "guided_options_request={'guided_regex': 'a'})",
        "guided_options_request must be left out: there is one",
    ),
    ("llm.chat('x', guided_options_request={'guided_regex': 'a'})", r"SamplingParams\(structured_outputs=...\)"),
    # names
    ("SamplingParams(temprature=0)", r"SamplingParams\(\) got .* 'temprature'; did you mean 'temperature'"),
    ("BeamSearchParams(beam_with=2)", "did you mean 'beam_width'"),
    ("PoolingParams(dimension=2)", "did you mean 'dimensions'"),
    ("StructuredOutputsParams(regexp='a')", "did you mean 'regex'"),
    ("llm.generate('x', priorty=1)", r"generate\(\) got .* 'priorty'; did you mean 'priority'"),
    ("llm.generate('x', sampling_param=greedy)", "did you mean 'sampling_params'"),
    ("llm.embed('x', truncate_prompt_tokens=4)", "truncate_prompt_tokens must be None, not 4: .*PoolingParams"),
    ("PoolingParams(normalize=True)", "normalize must be None, not True: its name is use_activation"),
    ("SamplingParams(priority=2)", "priority must be 0, not 2: it is a keyword of the call"),
    ("SamplingParams(guided_regex='a')", "guided_regex must be None.*structured_outputs=StructuredOutputsParams"),
    # beam search as one of the sampling parameters
    ("SamplingParams(length_penalty=0.5)", "length_penalty is of beam search: it needs use_beam_search=True"),
    ("SamplingParams(early_stopping=True)", "early_stopping is of beam search"),
    (
        "SamplingParams(use_beam_search=True, n=2, early_stopping='soon')",
        "early_stopping must be True, False or 'never",
    ),
    ("SamplingParams(use_beam_search=True, n=2, logprobs=1)", "logprobs must be left out with use_beam_search, not 1"),
    ("SamplingParams(use_beam_search=True, n=3, best_of=2)", "best_of"),
    ("llm.chat('x', chat_template_content_format='openai')", "chat_template_content_format must be"),
    ("llm.chat('x', continue_final_message=True)", "add_generation_prompt=False"),
    ("llm.chat('x', add_generation_prompt=False, continue_final_message=True, chat_template='a')", "continue_final_me"),
    ("llm.chat('x', chat_template_kwargs=3)", "chat_template_kwargs must be a dictionary"),
    ("llm.chat('x', chat_template_kwargs={'messages': []})", "chat_template_kwargs.*'messages'"),
    ("llm.chat(3)", "messages must be"),
    ("llm.generate(3)", "prompts must be"),
    ("SamplingParams(guided_decoding={'regexp': 'a'})", "structured_outputs.*'regexp'.*regex"),
    ("SamplingParams(guided_decoding={'regex': 'a'}, structured_outputs={'regex': 'a'})", "guided_decoding.*give one"),
    ("SamplingParams(structured_outputs={'regexp': 'a'})", "structured_outputs.*'regexp'"),
    ("SamplingParams(spaces_between_special_tokens=False)", "spaces_between_special_tokens must be True"),
    ("SamplingParams(truncate_prompt_tokens=0)", "truncate_prompt_tokens"),
    ("SamplingParams(output_kind='delta')", "output_kind must be"),
    ("BeamSearchParams(beam_width=2, temperature=0.7)", "temperature must be 0"),
    ("llm.get_tokenizer()('x', return_tensors='pt')", "padding must be False and return_tensors None"),
    ("llm.generate('x', SamplingParams(logprobs=-1))", r"logprobs must be in \[0, 100\], not \d+: .*max_logprobs"),
    ("SamplingParams(logprobs=-2)", "logprobs must be at least -1"),
    ("llm.classify('x')", "cannot classify; it can: generate text, embed"),
    ("llm.score('x', 'y')", "cannot score pairs; it can: generate text, embed"),
    ("llm.reward('x')", "cannot classify tokens; it can: generate text, embed"),
]


@pytest.fixture(scope="module")
def names(tiny_model: Path) -> dict[str, Any]:
    """What the programs see: everything of the package, a loaded model, and a way to load it otherwise."""
    import torch

    public = {name: getattr(octavo, name) for name in octavo.__all__}
    return {
        **public,
        "math": math,
        "re": re,
        "torch": torch,
        "model": str(tiny_model),
        "llm": LLM(str(tiny_model), **OPTIONS),
        "load": lambda **options: LLM(model=str(tiny_model), **{**OPTIONS, **options}),
        "greedy": octavo.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    }


def execute(program: str, names: dict[str, Any]) -> None:
    exec(textwrap.dedent(program), dict(names))


@pytest.mark.parametrize("program", [*LOADING, *WORKING])
def test_it_works(program: str, names: dict[str, Any]) -> None:
    execute(program, names)


@pytest.mark.parametrize(("program", "reason"), REFUSED)
def test_it_is_refused_with_the_reason(program: str, reason: str, names: dict[str, Any]) -> None:
    with pytest.raises(OctavoError, match=reason):
        execute(program, names)
    assert not names["llm"].llm_engine.has_unfinished_requests()


def test_the_page_of_differences_names_options_of_the_table() -> None:
    from octavo.core.foreign import FOREIGN_OPTIONS

    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    table = page.split("| option | accepted | otherwise |")[1].split("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert len(named) > 25
    assert set(named) <= FOREIGN_OPTIONS.keys()


def test_without_a_tokenizer_ids_go_in_and_come_out(tiny_model: Path, tmp_path: Path, names: dict[str, Any]) -> None:
    from octavo.engine.tokenizer import SkippedTokenizer
    from octavo.server.generation import LogprobsTracker, TokenNames, make_completion_logprobs

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny_model / name)
    llm = LLM(tmp_path, skip_tokenizer_init=True, **OPTIONS)
    params = octavo.SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    completion = llm.generate([70, 71, 72], params)[0].outputs[0]
    expected = names["llm"].generate([70, 71, 72], params)[0].outputs[0]
    assert (completion.token_ids, completion.text) == (expected.token_ids, "")
    tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, SkippedTokenizer)
    tokens = LogprobsTracker(tokenizer, [70, 71, 72], skip_special_tokens=True).advance(completion)
    assert make_completion_logprobs(TokenNames(tokenizer, False), tokens).tokens == [
        f"token_id:{i}" for i in expected.token_ids
    ]


def test_half_precision_is_float16(tiny_model: Path) -> None:
    from octavo.config.sources import resolve_config

    for given in ("half", "float16", __import__("torch").float16):
        assert resolve_config({"model": "m", "dtype": given}, environ={}).dtype == "float16"


def test_a_conversation_that_cannot_be_served_fails_alone_in_a_list(names: dict[str, Any]) -> None:
    llm: LLM = names["llm"]
    outputs = llm.chat(["good", 3, [{"role": "user"}]], names["greedy"])  # type: ignore[list-item]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "error"]
    assert "messages" in (outputs[1].outputs[0].error or "")


def test_an_asynchronous_engine_is_made_like_an_llm(tiny_model: Path, names: dict[str, Any]) -> None:
    from octavo import AsyncLLM, RequestOutputKind, SamplingParams

    async def converse() -> None:
        llm = AsyncLLM(str(tiny_model), **OPTIONS)  # loaded by what is awaited first
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        whole = names["llm"].generate("abc", params)[0].outputs[0].token_ids
        seen: dict[RequestOutputKind | None, list[list[int]]] = {}

        async def ask(kind: RequestOutputKind | None) -> None:
            given = params.clone()
            given.output_kind = kind
            seen[kind] = [o.outputs[0].token_ids async for o in llm.generate(str(kind), "abc", given)]

        await asyncio.gather(*map(ask, [None, *RequestOutputKind]))  # all of them find it unloaded
        assert seen[None][-1] == seen[RequestOutputKind.CUMULATIVE][-1] == whole
        assert len(seen[RequestOutputKind.CUMULATIVE]) > 1
        assert seen[RequestOutputKind.FINAL_ONLY] == [whole]
        assert len(seen[RequestOutputKind.DELTA]) > 1
        assert [token for ids in seen[RequestOutputKind.DELTA] for token in ids] == whole
        with pytest.raises(octavo.InvalidRequestError, match="in this order"):
            await anext(llm.generate("abc", params, "id"))  # type: ignore[arg-type]
        assert (await llm.get_tokenizer()).decode([70]) == names["llm"].get_tokenizer().decode([70])
        await llm.shutdown()
        with pytest.raises(octavo.EngineDeadError, match="shut down"):
            await llm.submit("late", "abc")

    asyncio.run(converse())


def test_an_asynchronous_engine_that_cannot_load_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    import psutil

    from octavo import AsyncLLM

    async def fail() -> None:
        with pytest.raises(octavo.ConfigError, match="no_such_option"):
            AsyncLLM("m", no_such_option=1)
        llm = AsyncLLM(str(tmp_path / "nothing"))
        for _ in range(2):
            with pytest.raises(octavo.ModelNotFoundError):
                await llm.submit("a", "abc")
        await llm.shutdown()
        never = AsyncLLM("m")
        await never.shutdown()
        with pytest.raises(octavo.EngineDeadError, match="shut down"):
            await never.ready()

    before = {p.pid for p in psutil.Process().children()}
    asyncio.run(fail())
    assert {p.pid for p in psutil.Process().children()} == before


def test_an_asynchronous_engine_is_a_context(tiny_model: Path) -> None:
    async def converse() -> None:
        async with octavo.AsyncLLM(str(tiny_model), **OPTIONS) as llm:
            assert llm.max_model_len == 256
        with pytest.raises(octavo.EngineDeadError):
            llm.check_alive()

    asyncio.run(converse())


def test_hints_name_parameters_of_methods() -> None:
    from octavo.core.request import METHOD_PARAMETERS

    methods = (LLM.generate, LLM.chat, LLM.encode, LLM.embed)
    assert {name for method in methods for name in inspect.signature(method).parameters} >= METHOD_PARAMETERS
