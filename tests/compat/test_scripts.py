"""Programs in the manner of vLLM's offline examples, with small models."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.compat.vllm.benchmarks.datasets import (  # type: ignore[import-not-found]
    add_dataset_parser,
    get_samples,
)
from octavo.compat.vllm.config import ProfilerConfig, VllmConfig  # type: ignore[import-not-found]
from octavo.compat.vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]
from octavo.compat.vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
from octavo.compat.vllm.model_executor.guided_decoding.guided_fields import (  # type: ignore[import-not-found]
    GuidedDecodingRequest,
)
from octavo.compat.vllm.sampling_params import (  # type: ignore[import-not-found]
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    StructuredOutputsParams,
)
from octavo.compat.vllm.tokenizers import get_tokenizer  # type: ignore[import-not-found]
from octavo.compat.vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]
from octavo.compat.vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found]
from octavo.compat.vllm.v1.metrics.reader import (  # type: ignore[import-not-found]
    Counter,
    Gauge,
    Histogram,
    Vector,
)
from octavo.compat.vllm.v1.sample.logits_processor import (  # type: ignore[import-not-found]
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)

from octavo import ConfigError, InvalidRequestError
from octavo.compat.vllm import (
    LLM,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    SamplingParams,
)
from tests.adapters import write_adapter

OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 96, "block_size": 4, "num_threads": 1}
PROMPTS = ["Hello, my name is", "The capital of France is", "The future"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def run(engine: Any, requests: list[tuple[Any, ...]], **more: Any) -> dict[str, RequestOutput]:
    """Adds a request before each step, as long as there are any; the outputs that have finished."""
    waiting, done, number = list(requests), {}, 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params, *rest = waiting.pop(0)
            engine.add_request(str(number), prompt, params, **({"lora_request": rest[0]} if rest else {}), **more)
            number += 1
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
    return done


def test_an_engine_of_arguments_prints_whole_outputs(tiny_model: Path) -> None:
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=1), GREEDY]
    params.append(SamplingParams(n=2, seed=1, max_tokens=5, presence_penalty=0.2, ignore_eos=True))
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(tiny_model), **OPTIONS))
    done = run(engine, list(zip(PROMPTS, params, strict=True)))
    expected = LLM(str(tiny_model), **OPTIONS).generate(PROMPTS, params, use_tqdm=False)
    assert [done[str(i)].outputs for i in range(3)] == [output.outputs for output in expected]
    assert [done[str(i)].prompt_logprobs for i in range(3)] == [output.prompt_logprobs for output in expected]
    assert engine.model_config.max_model_len == engine.core.max_model_len
    assert engine.model_config.get_vocab_size() == engine.core.model_config.vocab_size


def test_calls_of_older_versions_run(tiny_model: Path) -> None:
    config = EngineArgs(model=str(tiny_model), **OPTIONS).create_engine_config()
    engine = LLMEngine.from_vllm_config(config)
    expected = LLM(str(tiny_model), **OPTIONS).generate({"prompt_token_ids": [70, 71]}, GREEDY)[0].outputs
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (("0", None, GREEDY, [70, 71]), {}),  # 0.2
        (("1", "text", GREEDY, [70, 71], time.monotonic()), {}),
        (("2",), {"inputs": {"prompt_token_ids": [70, 71]}, "params": GREEDY, "arrival_time": time.time()}),  # 0.4
        (("3", None), {"sampling_params": GREEDY, "prompt_token_ids": [70, 71]}),
        (("4", [70, 71], GREEDY, time.time()), {"trace_headers": None, "priority": 0, "tokenization_kwargs": None}),
    ]
    for args, keywords in calls:
        engine.add_request(*args, **keywords)
    assert engine.get_num_unfinished_requests() == len(calls)
    done = {}
    while engine.has_unfinished_requests():
        done.update({output.request_id: output for output in engine.step() if output.finished})
    assert [done[str(i)].outputs for i in range(len(calls))] == [expected] * len(calls)
    assert done["1"].prompt == "text"
    assert all(0 <= each.metrics.finished_time - each.metrics.arrival_time < 60 for each in done.values())
    assert engine.get_model_config().max_model_len == engine.model_config.max_model_len == 256
    assert engine.cache_config.num_gpu_blocks == 96 and engine.get_scheduler_config().max_num_seqs > 0
    assert engine.cache_config.num_cpu_blocks >= 0 and engine.lora_config is None
    with pytest.raises(AttributeError, match=r"no attribute 'scheduler'; stats\(\) has"):
        engine.scheduler  # noqa: B018
    with pytest.raises(InvalidRequestError, match="prompt must be text"):
        engine.add_request("5", None, GREEDY)


def test_arguments_may_have_their_former_places_and_names(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **OPTIONS)
    expected = [o.outputs for o in llm.generate([[70, 71], [72]], GREEDY)]
    assert [o.outputs for o in llm.generate(None, GREEDY, [[70, 71], [72]], False, None)] == expected
    assert llm.chat("hi", GREEDY, False, None, "{{ messages[0].content }}")[0].prompt == "hi"
    with pytest.raises(TypeError, match="by position: prompt_token_ids, use_tqdm"):
        llm.generate(None, GREEDY, None, True, None, None, None, None, None)
    beams = llm.beam_search(["ab"], BeamSearchParams(beam_width=2, max_tokens=3), None, False)
    assert len(beams[0].sequences) == 2
    request = GuidedDecodingRequest(guided_regex="[0-9]{3}", guided_decoding_backend="outlines")
    assert llm.generate("x", SamplingParams(seed=1), guided_options_request=request)[0].outputs[0].text.isdigit()
    guided = GuidedDecodingParams.from_optional(choice=["yes", "no"], backend="xgrammar")
    assert llm.generate("x", SamplingParams(guided_decoding=guided))[0].outputs[0].text in ("yes", "no")
    assert GuidedDecodingParams.from_optional(json=None) is None
    with pytest.raises(InvalidRequestError, match="did you mean guided_json"):
        GuidedDecodingRequest(guided_jsn="{}")


def test_prefixes_are_dropped_in_the_midst_of_requests(tiny_model: Path) -> None:
    engine = LLM.from_engine_args(EngineArgs(model=str(tiny_model), **OPTIONS)).llm_engine
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    whole = engine.generate(PROMPTS[0], long, use_tqdm=False)[0].outputs[0].text
    engine.add_request("a", PROMPTS[0], long)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        if len(outputs) == 10:
            engine.reset_prefix_cache(reset_running_requests=True)
        outputs += engine.step()
    assert outputs[-1].finished and outputs[-1].outputs[0].text == whole
    assert engine.stats().recomputed_tokens > 10


def test_adapters_come_with_requests(tiny_model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny_model)
    args = EngineArgs(model=str(tiny_model), enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, **OPTIONS)
    engine = LLMEngine.from_engine_args(args)
    named = [LoRARequest("one", 1, str(adapter)), LoRARequest("two", 2, str(adapter))]
    older = LoRARequest("three", 3, lora_local_path=str(adapter), long_lora_max_len=None, base_model_name="m")
    assert (older.lora_path, older.name, older.adapter_id) == (str(adapter), "three", 3)
    with pytest.raises(TypeError, match="did you mean 'lora_path'"):
        LoRARequest("four", 4, lora_pth="x")
    done = run(engine, [(PROMPTS[0], GREEDY, None), (PROMPTS[0], GREEDY, named[0]), (PROMPTS[0], GREEDY, named[1])])
    assert done["1"].outputs[0].token_ids == done["2"].outputs[0].token_ids != done["0"].outputs[0].token_ids


def test_text_is_streamed_and_generation_paused(tiny_model: Path) -> None:
    whole = LLM(str(tiny_model), **OPTIONS).generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tiny_model), enforce_eager=True, **OPTIONS))
        params = GREEDY.clone()
        params.output_kind = RequestOutputKind.DELTA
        parts = [
            output.outputs[0].text
            async for output in engine.generate(request_id="a", prompt=PROMPTS[0], sampling_params=params)
        ]
        assert len(parts) > 1 and "".join(parts) == whole
        async for output in engine.generate(PROMPTS[0], GREEDY, "b"):
            last = output
        assert last.outputs[0].text == whole
        await engine.pause_generation(mode="keep")
        await engine.resume_generation()
        await engine.abort(["a", "b"])
        await engine.check_health()
        assert engine.is_running and not engine.errored
        engine.shutdown()
        assert engine.errored and not engine.is_running and engine.dead_error is not None

    asyncio.run(main())
    assert AsyncLLMEngine is AsyncLLM


def test_structured_output_and_chat(tiny_model: Path) -> None:
    llm = LLM(model=str(tiny_model), max_model_len=200, **OPTIONS)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), max_tokens=5)
    assert llm.generate("?", params, use_tqdm=False)[0].outputs[0].text in ("yes", "no")
    defaults = llm.get_default_sampling_params()
    defaults.max_tokens = 3
    outputs = llm.chat([[{"role": "user", "content": "hi"}]] * 2, defaults, use_tqdm=False)
    assert all(isinstance(output, RequestOutput) and output.prompt.startswith("user: hi") for output in outputs)


def test_metrics_have_vllms_names(tiny_model: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    llm = LLM(
        model=str(tiny_model), speculative_config=drafts, disable_log_stats=False, limit_mm_per_prompt={"image": 5},
        disable_chunked_mm_input=True, max_num_seqs=None, allowed_local_media_path="", **OPTIONS,
    )  # fmt: skip
    delta = GREEDY.clone()
    delta.output_kind = RequestOutputKind.DELTA
    run(llm.llm_engine, [("abcabcabcabc", delta)])
    outputs = llm.generate(["abcabcabcabc", "b"], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert isinstance(metrics["vllm:num_requests_running"], Gauge) and metrics["vllm:num_requests_running"].value == 0
    assert isinstance(metrics["vllm:generation_tokens"], Counter) and metrics["vllm:generation_tokens"].value == 66
    prompts = len(outputs[0].prompt_token_ids) * 2 + len(outputs[1].prompt_token_ids)
    assert metrics["vllm:prompt_tokens"].value == prompts
    drafted, per_position = (
        metrics["vllm:spec_decode_num_drafts"],
        metrics["vllm:spec_decode_num_accepted_tokens_per_pos"],
    )
    assert drafted.value > 0 and isinstance(per_position, Vector) and len(per_position.values) == 3
    assert sum(per_position.values) == metrics["vllm:spec_decode_num_accepted_tokens"].value
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_generation_tokens"):
        histogram = metrics[f"vllm:{name}"]
        assert isinstance(histogram, Histogram) and histogram.count == histogram.buckets["+Inf"] == 3
        assert histogram.sum > 0 and list(histogram.buckets.values()) == sorted(histogram.buckets.values())
    assert metrics["vllm:request_generation_tokens"].buckets["10.0"] == 1


class Pinned(LogitsProcessor):
    """Only the token that the request names; of the whole batch."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if not isinstance((params.extra_args or {}).get("target", 0), int):
            raise ValueError("target must be an integer")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.model_config.vocab_size > 0 and device.type == "cpu"
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.targets, batch_update, lambda params, _, __: (params.extra_args or {}).get("target"))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, target in self.targets.items():
            kept = logits[row, target].item()
            logits[row] = -math.inf
            logits[row, target] = kept
        return logits


class Rising(AdapterLogitsProcessor):
    """From the request's ``first`` on, each token is the one after that before it."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        first = (params.extra_args or {}).get("first")
        if first is None:
            return None

        def process(prompt: list[int], outputs: list[int], logits: torch.Tensor) -> torch.Tensor:
            allowed = outputs[-1] + 1 if outputs else first
            return torch.full_like(logits, -math.inf).index_fill(0, torch.tensor(allowed), 0.0)

        return process


def test_processors_of_batches_edit_the_logits_of_their_requests(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), logits_processors=[Pinned, f"{__name__}:Rising"], **OPTIONS)
    plain = LLM(str(tiny_model), **OPTIONS).generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    def params(n: int = 1, **extra_args: Any) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, n=n, extra_args=extra_args or None)

    asked = [params(target=77), params(), params(2, first=100), params(first=40)]
    outputs = llm.generate([PROMPTS[0]] * 4, asked, use_tqdm=False)
    tokens = [completion.token_ids for output in outputs for completion in output.outputs]
    rising = [list(range(first, first + 6)) for first in (100, 100, 40)]
    assert tokens == [[77] * 6, plain, *rising]
    assert asked[0].extra_args == {"target": 77} and asked[0].logits_processors is None
    with pytest.raises(InvalidRequestError, match="target must be an integer"):
        llm.generate(PROMPTS[0], params(target="x"))
    with pytest.raises(ConfigError, match="classes of LogitsProcessor"):
        LLM(str(tiny_model), logits_processors=[print])
    with pytest.raises(ConfigError, match="cannot be imported"):
        LLM(str(tiny_model), logits_processors="no_such_module:X")


def test_rows_that_change_places_take_what_is_theirs_along() -> None:
    rows = {0: "a", 1: "b", 2: "c"}
    move = BatchUpdate(2, [0], [(3, GREEDY, None, [])], [(2, 0, MoveDirectionality.UNIDIRECTIONAL)])
    assert process_dict_updates(rows, move, lambda *_: "d") and rows == {0: "c", 1: "b", 3: "d"}
    assert process_dict_updates(rows, BatchUpdate(2, [], [], [(0, 1, MoveDirectionality.SWAP)]), lambda *_: None)
    assert rows == {0: "b", 1: "c", 3: "d"}
    assert not process_dict_updates(rows, None, lambda *_: "e")


def test_samples_are_drawn_or_read(tiny_model: Path, tmp_path: Path) -> None:
    parser = FlexibleArgumentParser()
    add_dataset_parser(parser)
    tokenizer = get_tokenizer(str(tiny_model))
    drawn = parser.parse_args(["--num-prompts", "3", "--random-input-len", "9", "--seed", "5"])
    samples = get_samples(drawn, tokenizer)
    assert len(samples) == 3 and len({sample.prompt for sample in samples}) == 3
    assert get_samples(drawn, tokenizer) == samples and samples[0].expected_output_len == 128
    (tmp_path / "lines").write_text('{"prompt": "a"}\n{"prompt": "bc"}\n')
    (tmp_path / "talks").write_text('[{"conversations": [{"from": "human", "value": "hi"}]}, {"conversations": []}]')
    for kind, name, texts in (("custom", "lines", ["a", "bc", "a"]), ("sharegpt", "talks", ["hi"] * 3)):
        words = ["--num-prompts=3", f"--dataset-name={kind}", f"--dataset-path={tmp_path / name}"]
        samples = get_samples(parser.parse_args(words), tokenizer)
        assert [sample.prompt for sample in samples] == texts
        assert [sample.prompt_len for sample in samples] == [len(tokenizer.encode(text)) for text in texts]
    for words in (["--dataset-name=custom"], ["--dataset-name=sharegpt", f"--dataset-path={tmp_path / 'lines'}"]):
        with pytest.raises(ConfigError, match=r"--dataset-path|cannot be read as sharegpt"):
            get_samples(parser.parse_args(words), tokenizer)


def test_workers_are_called_in_vllms_order(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **OPTIONS)
    assert llm.collective_rpc(lambda worker, more: more, 10.0, (3,)) == [3]


def test_a_profile_is_a_trace_in_a_folder(tiny_model: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny_model), profiler_config={"profiler": "torch", "torch_profiler_dir": str(tmp_path)}, **OPTIONS)
    llm.start_profile()
    llm.generate("a", GREEDY, use_tqdm=False)
    path = llm.stop_profile()
    assert path is not None and path.parent == tmp_path and '"traceEvents"' in path.read_text()
    assert llm.stop_profile() is None
    with pytest.raises(ConfigError, match="start_profile needs a folder"):
        LLM(str(tiny_model), profiler_config=ProfilerConfig(), **OPTIONS).start_profile()
    with pytest.raises(ConfigError, match="profiler must be 'torch'"):
        LLM(str(tiny_model), profiler_config={"profiler": "cuda"}, **OPTIONS)
