"""The parts of the engine's options: a room takes the type of its part alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from octavo.core.errors import ConfigError, did_you_mean
from octavo.core.request import DEFAULT_IMAGE_CACHE

# The base of the parts of the engine's options, and options that are mappings.


class OptionPart(BaseModel):
    """A part: unknown names are refused, and nothing changes after it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)


def read_mapping(value: Any, example: str) -> Any:
    """The fields that an option gives, as a mapping or as one in JSON or YAML; without those that are None.

    Anything else that ``OptionPart`` or None is comes back as it is.

    Raises:
        ValueError: it is no mapping.
    """
    if isinstance(value, str):
        import yaml  # rarely needed

        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"it must be a mapping such as {example}") from None
    if value is None or isinstance(value, OptionPart):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"it must be a mapping such as {example}")
    return {str(name): field for name, field in value.items() if field is not None}


def make_part(kind: type[OptionPart], fields: Mapping[str, Any]) -> OptionPart:
    """The part with these fields.

    Raises:
        ValueError: a field is unknown or wrong, with its name, its value and what would be right.
    """
    names = list(kind.model_fields)
    for name in fields:
        if name not in names:
            raise ValueError(f"unknown field {name!r}; {did_you_mean(name, names)}")
    try:
        return kind(**fields)
    except ValidationError as e:
        raise ValueError("; ".join(readable(dict(error)) for error in e.errors())) from None


def readable(error: dict[str, Any]) -> str:
    """An error of pydantic in words: the field, what is wrong, and its value."""
    where = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}, not {error['input']!r}" if where else message


#: Default of ``max_logprobs``, and the most that kernels on a GPU name.
MAX_LOGPROBS, MAX_LOGPROBS_ON_GPU = 100, 128


def _numbers(value: Any) -> Any:
    """The numbers of a text such as "1,2,4"; anything else as it is."""
    return [int(part) for part in value.split(",")] if isinstance(value, str) else value


#: Least seconds that the first step may take: on a GPU it compiles kernels.
FIRST_STEP_TIMEOUT = 900.0

#: A list of positive integers; in flags and variables with commas between.
Sizes = Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(_numbers), Field(min_length=1)]

#: When graphs are captured, or the batch sizes that have one.
GraphCapture = Annotated[
    Annotated[Literal["lazy", "start"], Tag("when")] | Annotated[Sizes, Tag("sizes")],
    Discriminator(lambda value: "when" if value in ("lazy", "start") else "sizes"),
]

#: How matrices are quantised as they are loaded.
Quantization = Literal["auto", "none", "int8", "int4", "fp8", "gguf", "gptq", "awq", "compressed-tensors"]


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _overrides(value: Any) -> Any:
    return read_mapping(value, '{"max_position_embeddings": 65536}') or None


class ModelOptions(OptionPart):
    """The network, its weights and its tokenizer."""

    model: str = Field(
        description="A built-in name (smollm2-135m), a Hugging Face folder, a .gguf file, or a hub id (owner/name)."
    )
    task: Literal["auto", "generate", "embed", "classify", "score"] = Field(
        "auto",
        description="What the model is for, where its files do not say it: text (generate), vectors (embed), class "
        "scores (classify), or how well texts fit (score: of a language model that answers yes or no). auto: all that "
        "its network has a head for.",
    )
    tokenizer: str | None = Field(None, description="Folder with a tokenizer, if not the model's own.")
    skip_tokenizer_init: bool = Field(
        False,
        description="Load no tokenizer: prompts are token ids and so are answers, whose text stays empty; text, chat, "
        "stop strings and bad words are refused. Clients of the server find the ids among the logprobs (logprobs: 0).",
    )
    chat_template: str | None = Field(
        None,
        description="File of a chat template (jinja) for conversations, in place of the model's own.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights and activations; auto: as the checkpoint, on the CPU float16 as bfloat16, and "
        "GGUF as bfloat16. float16 is for GPUs. half and float are other names of float16 and float32.",
    )
    quantization: Quantization = Field(
        "auto",
        description="Quantise the matrices as they are loaded (int8, int4; fp8 on GPUs), compute with those of a GGUF "
        "file in the file's own bits (gguf, on CPUs; types of 2, 3, 5 and 6 bits widened to 8), or in dtype (none). "
        "auto: on a CPU gguf for a .gguf file, and the integers of a GPTQ, AWQ or compressed-tensors checkpoint as "
        "they are; else none, so that quantised checkpoints are dequantised; the built-in models are served in dtype. "
        "gptq, awq and compressed-tensors mean auto for such a checkpoint.",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto",
        description="Where the weights come from: the checkpoint (auto, safetensors), or nowhere: random numbers of "
        "the right shapes (dummy), for measurements with a config.json alone.",
    )
    hf_overrides: Annotated[dict[str, Any] | None, BeforeValidator(_overrides)] = Field(
        None,
        description="Values in place of those of config.json, as JSON; objects are merged. So a context is stretched: "
        '{"max_position_embeddings": 65536, "rope_parameters": {"rope_type": "yarn", "factor": 8.0, '
        '"original_max_position_embeddings": 8192}}.',
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Longest prompt plus output, in tokens; default: the model's own context length."
    )
    max_logprobs: int | None = Field(
        None,
        ge=-1,
        description="Number of most likely tokens at each position whose logprobs a request may ask for; -1: the whole "
        f"vocabulary (on a GPU at most {MAX_LOGPROBS_ON_GPU}); default: {MAX_LOGPROBS}, over HTTP 20.",
    )
    logits_processors: Annotated[list[str] | None, BeforeValidator(_one_or_more)] = Field(
        None,
        description="Logits processors of one's own (module:Class, a LogitsProcessorPlugin); requests ask for them by "
        "their arguments, in extra_args (over HTTP vllm_xargs).",
    )
    generation_config: str = Field(
        "auto",
        description="Where defaults of sampling parameters come from that a request leaves out: generation_config.json "
        "of the model, the sampling keys of its GGUF file, or of a built-in model those of its authors (auto); "
        "generation_config.json of this folder; or nowhere (none, in vLLM's words vllm).",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Seeds the requests that bring no seed of their own.")

    @field_validator("quantization", mode="before")
    @classmethod
    def _none_is_the_default(cls, value: object) -> object:
        return "auto" if value is None else value

    @model_validator(mode="after")
    def _no_tokenizer_to_skip(self) -> Self:
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ValueError(f"skip_tokenizer_init loads no tokenizer; leave it out, or tokenizer ({self.tokenizer})")
        return self


class CacheOptions(OptionPart):
    """The KV cache: its blocks on the device and on the host, and prefix caching."""

    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"] = Field(
        "auto",
        description="Type of the KV cache; auto: as dtype; int8 and fp8 (e4m3, GPUs only) halve bfloat16's bytes, with "
        "a scale for each token and head.",
    )
    block_size: int = Field(16, ge=1, le=1024, description="Tokens that a KV cache block holds.")
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="On a GPU: the share of its memory that the engine may take in all, for weights, the largest step "
        "and the KV cache (default 0.9). On a CPU: the share of the memory that is free after the weights are loaded, "
        "for the KV cache alone (default 0.5).",
    )
    kv_cache_memory_bytes: ByteSize | None = Field(
        None,
        ge=1,
        description="Memory for the KV cache of each worker, in bytes or with a unit (4GiB, 900MB), instead of a share "
        "of the free memory (gpu_memory_utilization).",
    )
    num_gpu_blocks_override: int | None = Field(
        None,
        ge=1,
        description="Number of KV cache blocks, instead of the number that the free memory gives; refused if they do "
        "not fit.",
    )
    swap_space: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Host memory for the KV cache blocks of preempted requests, in GiB, divided among the workers of a "
        "machine; default: 4, or a tenth of the free memory if that is less, and on a GPU no more blocks than its KV "
        "cache has unless host_prefix_cache uses them; none if no option moves blocks there. On a CPU it is left out "
        "of what the KV cache gets.",
    )
    num_host_blocks_override: int | None = Field(
        None,
        ge=0,
        description="Number of host blocks for preempted requests, instead of what swap_space gives; refused if they "
        "do not fit.",
    )
    watermark: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="Share of all blocks kept free when a waiting request is admitted, so that running ones can grow.",
    )
    enable_prefix_caching: bool = Field(
        True, description="Keep the blocks of ended requests for prompts that begin alike, until they are needed."
    )
    host_prefix_cache: bool = Field(
        False, description="Move cached blocks to free swap space instead of dropping them, and back when they are hit."
    )
    shared_prefix: Annotated[list[str] | None, BeforeValidator(_one_or_more)] = Field(
        None,
        description="File of text that many prompts begin with, such as a system prompt as the chat template renders "
        "it; several in a list, or by repeating the flag. Its KV cache blocks are computed at start and stay in "
        "the prefix cache.",
    )

    @property
    def has_swap_space(self) -> bool:
        """Whether the options allow host blocks; how many there are depends on the memory."""
        if self.num_host_blocks_override is not None:
            return self.num_host_blocks_override > 0
        return self.swap_space is None or self.swap_space > 0

    @model_validator(mode="after")
    def _caches_have_a_source_and_a_place(self) -> Self:
        if self.shared_prefix and not self.enable_prefix_caching:
            raise ValueError(
                f"shared_prefix ({', '.join(self.shared_prefix)}) needs enable_prefix_caching, which is off"
            )
        if self.host_prefix_cache and not self.enable_prefix_caching:
            raise ValueError("host_prefix_cache needs enable_prefix_caching: it holds the blocks that this one caches")
        if self.host_prefix_cache and not self.has_swap_space:
            raise ValueError("host_prefix_cache needs swap space: set swap_space, or num_host_blocks_override, above 0")
        return self


class AdapterOptions(OptionPart):
    """Adapters of the model: fine-tunes that requests name, and that share its weights."""

    enable_lora: bool = Field(False, description="Serve LoRA adapters beside the model itself.")
    max_loras: int = Field(8, ge=1, le=4096, description="LoRA adapters on the device at once, and so in one step.")
    max_lora_rank: int = Field(16, ge=1, le=256, description="Largest rank of a LoRA adapter.")
    max_cpu_loras: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="LoRA adapters in host memory, those on the device included; default: four times max_loras.",
    )
    enable_prompt_adapter: bool = Field(False, description="Serve adapters of prompt tuning and prefix tuning.")
    max_prompt_adapters: int = Field(8, ge=1, le=4096, description="Prompt adapters in memory at once.")
    max_prompt_adapter_token: int = Field(128, ge=1, le=65536, description="Most virtual tokens of a prompt adapter.")

    @property
    def num_virtual_tokens(self) -> int:
        """Virtual tokens of all prompt adapters in memory."""
        return self.max_prompt_adapters * self.max_prompt_adapter_token if self.enable_prompt_adapter else 0

    @property
    def num_host_loras(self) -> int:
        """LoRA adapters in host memory, those on the device included."""
        return 4 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @model_validator(mode="after")
    def _host_memory_holds_those_on_the_device(self) -> Self:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras ({self.max_loras}): adapters on the "
                "device stay in host memory"
            )
        return self


class DeviceOptions(OptionPart):
    """Where the model is computed, and by which kernels."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto: on a CUDA GPU if there is one."
    )
    kernels: Literal["auto", "cpu", "triton", "reference"] = Field(
        "auto", description="Kernel backend; auto takes the fastest that the device can run."
    )
    deterministic: bool = Field(
        False,
        description="On a GPU: products and attention in one fixed order, so that a request's tokens and logprobs are "
        "bit for bit the same in any batch, at some cost in speed. On a CPU they always are.",
    )
    enforce_eager: bool = Field(False, description="On a GPU: launch every kernel anew, without captured CUDA graphs.")
    graph_capture: GraphCapture = Field(
        "lazy",
        description="On a GPU: which decode batch sizes have a CUDA graph, each for the batches up to it, and when it "
        "is captured. lazy: 1, 2, 4, then every 8th and further apart up to max_num_seqs, when one is first met; "
        "start: all of these at start; 1,2,4,8: these sizes, when one is first met, and larger batches run without.",
    )
    time_kernels: bool = Field(
        False, description="Time every kernel call, so that a step's share of time outside kernels is known."
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads that compute, divided among the workers of a machine; default: all cores.",
    )
    log_stats_interval: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Seconds between two status lines in the log (logger octavo, level info) while the engine is busy: "
        "requests, tokens a second, KV cache, prefix hits; 0: none. Default: none, but 5 for octavo serve.",
    )
    pin_threads: bool = Field(
        False,
        description="Keep each CPU thread that computes on a core of its own; for machines with nothing else to do.",
    )

    @field_validator("graph_capture", mode="before")
    @classmethod
    def _no_sizes_are_the_default(cls, value: object) -> object:
        return "lazy" if value is None else value

    @property
    def graph_sizes(self) -> list[int] | None:
        """The batch sizes that ``graph_capture`` names, if it does."""
        return self.graph_capture if isinstance(self.graph_capture, list) else None


class ParallelOptions(OptionPart):
    """How many workers share the network, and what runs them."""

    tensor_parallel_size: int = Field(
        1, ge=1, le=1024, description="Workers that divide the matrices and heads of every layer among them."
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, le=1024, description="Stages of workers that divide the layers among them, one after the other."
    )
    pipeline_layer_partition: list[int] | None = Field(
        None, description="Layers of each pipeline stage, such as [8, 8, 14]; default: divided evenly."
    )
    distributed_executor_backend: Literal["uni", "mp", "ray", "external_launcher"] | None = Field(
        None,
        description="What runs the workers: this process (uni), processes of this machine (mp), actors on a Ray "
        "cluster (ray), or a launcher such as torchrun that has started a process for each (external_launcher). "
        "Default: uni for one worker, mp for as many as this machine has devices for, else ray.",
    )

    data_parallel_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="Replicas of the engine behind one server, each with workers and a KV cache of its own. They "
        "divide the machine's threads and memory.",
    )
    data_parallel_routing: Literal["prefix", "least_loaded", "round_robin"] = Field(
        "prefix",
        description="Which replica gets a request: the one that probably has its prefix cached, unless it has many "
        "more tokens to compute (prefix), the one with the fewest tokens to compute (least_loaded), or the next.",
    )
    engine_restarts: int = Field(
        3,
        ge=0,
        le=1_000_000,
        description="How often within ten minutes an engine core that has died or hangs is started again, of each "
        "replica; its requests go on with the same bits. Then, or with 0, the engine ends when its last core has died.",
    )
    standby_engines: int = Field(
        0,
        ge=0,
        le=64,
        description="Engine cores kept loaded in reserve, that take the place of one that has died at once; each takes "
        "the memory of one.",
    )
    step_timeout: float = Field(
        300.0,
        gt=0,
        description="Seconds without a step, while requests are open, after which an engine's process, or workers in "
        f"processes of their own, are taken to hang and ended; the first step may take {FIRST_STEP_TIMEOUT:g}. On "
        "Linux the time in which they were ready to run while other processes had the processors does not count. "
        "A step that fills the token budget of a model of 7 billion parameters takes two minutes on a few "
        "processor cores.",
    )
    check_plans: bool = Field(
        True,
        description="With external_launcher: compare the plans of all processes before every step, so that one that "
        "got other requests ends the engine with an error, not in a collective that never ends.",
    )
    check_ranks: int | None = Field(
        None,
        ge=0,
        le=1 << 20,
        description="With tensor_parallel_size above 1: every so many steps compare what the workers have sampled "
        "since; if that differs the engine ends with an error that names ranks and steps. 0: never. Default: every "
        "step, but with external_launcher only together with check_plans.",
    )

    @property
    def rank_check_interval(self) -> int:
        """Steps between two comparisons of what tensor-parallel ranks sample; 0: they are not compared."""
        if self.tensor_parallel_size == 1:
            return 0
        if self.check_ranks is not None:
            return self.check_ranks
        return int(self.distributed_executor_backend != "external_launcher" or self.check_plans)

    @property
    def world_size(self) -> int:
        """Workers of one engine core."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def _partition_has_all_stages(self) -> Self:
        partition, stages = self.pipeline_layer_partition, self.pipeline_parallel_size
        if partition is not None and (len(partition) != stages or min(partition) < 1):
            raise ValueError(
                f"pipeline_layer_partition ({partition}) must have a positive number for each of the {stages} stages "
                "of pipeline_parallel_size"
            )
        if self.distributed_executor_backend == "uni" and self.world_size > 1:
            raise ValueError(
                f"distributed_executor_backend='uni' runs one worker, but tensor_parallel_size x "
                f"pipeline_parallel_size is {self.world_size}; use mp, ray or external_launcher"
            )
        return self


# The options of the scheduler.

#: Defaults of ``max_num_batched_tokens``: in general, and on a CPU with batching=mixed.
TOKEN_BUDGET, CPU_TOKEN_BUDGET = 2048, 512
#: That of encoders on a CPU: products of more rows are not faster, and a step is what a new text waits for.
ENCODER_TOKEN_BUDGET = 1024


def _shares(value: Any) -> Any:
    """The mapping of a text such as "alice=2,bob=0.5"; anything else as it is."""
    if not isinstance(value, str):
        return value
    return dict(part.rpartition("=")[::2] for part in value.split(","))


#: Positive numbers by name; in flags and variables ``name=number`` with commas between.
Weights = Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], BeforeValidator(_shares)]


class SchedulerOptions(OptionPart):
    """How a step is filled, in which order requests run, and which are preempted."""

    max_num_seqs: int = Field(
        256,
        ge=1,
        description="Most sequences that run at once; by default no more than a max_num_batched_tokens that is given.",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Token budget: most tokens computed in one step, prompts and decodes together. Default: "
        f"{TOKEN_BUDGET}; {CPU_TOKEN_BUDGET} on a CPU with batching=mixed, {ENCODER_TOKEN_BUDGET} of encoders; where "
        "prompts are computed whole, the context length if that is more; never less than max_num_seqs. A text that is "
        "longer is computed by an encoder in a step of its own.",
    )
    max_num_encoder_input_tokens: int | None = Field(
        None,
        ge=1,
        description="Of encoder-decoder models: most tokens of encoders' inputs that are computed in one step, beside "
        "its other tokens, so that long inputs do not stall decodes. An input is computed whole; one that is longer "
        "has no other beside it. Default: max_num_batched_tokens.",
    )
    batching: Literal["mixed", "prefill_first"] = Field(
        "mixed",
        description="How a step is filled. mixed: decodes first, then prompt chunks, under one token budget; "
        "prefill_first: whole prompts in steps of their own, which go before decodes.",
    )
    enable_chunked_prefill: bool = Field(
        True, description="Split prompts over steps to fill the token budget; off: a prompt is computed in one step."
    )
    scheduling_policy: str = Field(
        "fcfs",
        description="Order of admission, preemption and return: fcfs (arrival), static (the request's priority, lower "
        "first), sjf (smallest max_tokens), ldf (most tokens of prompt and output), lcfs (latest arrival), srpt "
        "(fewest remaining tokens, as predicted from finished requests), fair (the user with the least service), "
        "deadline (the next token due, of those that can be in time), mlfq (least service received, in queues), or "
        "module:Class.",
    )
    user_weights: Weights | None = Field(
        None,
        description="With scheduling_policy fair: shares of users (the request's field user) as alice=2,bob=0.5; 1 for "
        "those that are not named.",
    )
    ttft_target: float | None = Field(
        None,
        gt=0,
        description="With scheduling_policy deadline: seconds from its arrival in which a request that brings no "
        "ttft_target of its own shall have its first token; default: no deadline.",
    )
    tpot_target: float | None = Field(
        None,
        gt=0,
        description="With scheduling_policy deadline: seconds between tokens after the first, of a request that brings "
        "no tpot_target of its own; default: no deadline.",
    )
    aging_limit: float | None = Field(
        60.0,
        ge=0,
        description="Seconds after which no later arrival goes before a request, whatever the policy; none: no limit.",
    )
    preemption_mode: Literal["auto", "recompute", "swap", "by_sequences"] = Field(
        "auto",
        description="What becomes of the blocks of a preempted request: given up and computed again, or moved to host "
        "memory and back. by_sequences: swap for several sequences, recompute for one; auto: swap for several, for one "
        "whichever has been observed to cost less time.",
    )
    preemption_victim: Literal["last", "least_computed", "most_blocks"] = Field(
        "last",
        description="Which request is preempted of those that the policy puts after the one that needs blocks: the "
        "last of them, or the one with the fewest computed tokens, or with the most blocks.",
    )
    priority_preemption: bool = Field(
        False, description="Let a waiting request preempt running ones of lower priority (scheduling_policy static)."
    )
    scheduler_delay_factor: float = Field(
        0.0,
        ge=0,
        description="With batching=prefill_first: waiting prompts are admitted when the first that arrived has waited "
        "this many times the last prompt step's time, so that more arrive meanwhile.",
    )
    max_num_partial_prefills: int | None = Field(
        None, ge=1, description="Most prompts being computed at once; default: as many as the token budget takes."
    )
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="Prompts of more tokens are long: short ones pass them, one is computed at once, and it gets at "
        "most this many tokens a step. 0: none is.",
    )
    async_scheduling: bool | None = Field(
        None,
        description="Prepare the next step while the device computes this one; default: true on a GPU, else false.",
    )

    jump_forward: bool = Field(
        True,
        description="With structured outputs: append tokens that a grammar forces without sampling them, and compute "
        "them together, which changes no answer. Not done with async_scheduling.",
    )

    def plans_ahead(self, device: str) -> bool:
        """Whether ``async_scheduling`` is on, on a device of this kind ("cpu" or "cuda")."""
        return device != "cpu" if self.async_scheduling is None else self.async_scheduling

    @property
    def cuts_prompts(self) -> bool:
        """Whether a prompt may be computed in chunks of any length."""
        return self.enable_chunked_prefill and self.batching == "mixed"

    @property
    def encoder_budget(self) -> int:
        """``max_num_encoder_input_tokens``, by default as many as ``token_budget``."""
        return self.max_num_encoder_input_tokens or self.token_budget

    @property
    def token_budget(self) -> int:
        """``max_num_batched_tokens``, once it is resolved (``with_token_budget``); before that, its general default."""
        return self.max_num_batched_tokens or max(TOKEN_BUDGET, self.max_num_seqs)

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            if "max_num_seqs" in self.model_fields_set:
                raise ValueError(
                    f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({self.max_num_seqs}): each "
                    "running sequence decodes one token a step"
                )
            object.__setattr__(self, "max_num_seqs", budget)  # a default, so it does not become a given field
        if self.scheduler_delay_factor and self.batching != "prefill_first":
            raise ValueError(
                f"scheduler_delay_factor ({self.scheduler_delay_factor:g}) needs batching 'prefill_first'; batching "
                f"{self.batching!r} has no prompt steps that could be delayed"
            )
        if self.priority_preemption and self.scheduling_policy != "static" and ":" not in self.scheduling_policy:
            raise ValueError(
                f"priority_preemption needs a policy that looks at priorities, such as static; scheduling_policy "
                f"{self.scheduling_policy!r} does not"
            )
        return self

    @model_validator(mode="after")
    def _settings_of_the_policy(self) -> Self:
        chosen = self.scheduling_policy
        for name, policy in (("user_weights", "fair"), ("ttft_target", "deadline"), ("tpot_target", "deadline")):
            value = getattr(self, name)
            if value is not None and chosen != policy and ":" not in chosen:
                raise ValueError(f"{name} ({value}) is of scheduling_policy {policy!r}; {chosen!r} does not look at it")
        return self


# The option ``speculative_config``: which drafter proposes tokens, and how many.

#: Methods whose drafts the workers propose, with a network of their own that ``model`` names.
MODEL_METHODS = ("draft_model", "eagle", "eagle3")
#: Methods of vLLM that are not supported.
_FOREIGN_METHODS = ("medusa", "mlp_speculator", "mtp")
_OWN_METHODS = ("ngram", "suffix", *MODEL_METHODS, "prediction")
#: Self-speculation, see docs/speculation.md.
_LAYER_SKIP = "the first layers of a model that is not trained for it seldom say what the whole model says"


class SpeculativeConfig(OptionPart):
    """How drafts are made. Names of fields are those of vLLM, where it has them."""

    model_config = ConfigDict(strict=True)

    #: ``ngram``: what followed the same tokens earlier in the sequence. ``suffix``: also what followed them in recent
    #: outputs of other requests. ``draft_model``: what a smaller model with the same vocabulary says. ``eagle`` and
    #: ``eagle3``: what a head says that was trained on the model's hidden states. ``prediction``: what a request says
    #: that its answer is likely to be; alone, as other methods draft from that, too.
    method: Literal["ngram", "suffix", "prediction", "draft_model", "eagle", "eagle3"]
    #: Most draft tokens of a sequence in a step; with the token before them, 7 make a tile of the CPU kernels.
    num_speculative_tokens: int = Field(7, ge=1, le=64)
    #: Fewest and most tokens that must have occurred before.
    prompt_lookup_min: int = Field(2, ge=1, le=32)
    prompt_lookup_max: int = Field(4, ge=1, le=32)
    #: Of ``suffix``: most tokens of a match, and tokens of outputs that are kept.
    suffix_decoding_max_tree_depth: int = Field(24, ge=2, le=256)
    suffix_decoding_max_cached_tokens: int = Field(1 << 18, ge=1 << 10, le=1 << 28)
    #: Of ``draft_model``, ``eagle`` and ``eagle3``: a name or folder as in the option ``model``; of ``draft_model``,
    #: also how its matrices are quantised, as in the option ``quantization``.
    model: str | None = None
    quantization: Quantization | None = None
    revision: str | None = None
    #: Whether the number of draft tokens follows what is accepted and what a step costs.
    adaptive: bool = True

    @property
    def drafts_on_workers(self) -> bool:
        """Whether the workers propose the drafts, with a network of their own."""
        return self.method in MODEL_METHODS

    @model_validator(mode="before")
    @classmethod
    def _bounds_meet(cls, fields: Any) -> Any:
        """A bound that is given alone moves a default of the other that contradicts it."""
        if not isinstance(fields, dict):
            return fields
        low, high = fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max")
        if isinstance(low, int) and high is None:
            return {**fields, "prompt_lookup_max": max(low, 4)}
        if isinstance(high, int) and low is None:
            return {**fields, "prompt_lookup_min": min(high, 2)}
        return fields

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        return self


def _parse(value: Any) -> Any:
    """A configuration from a mapping, or from one as JSON or YAML text; None and configurations as they are.

    Raises:
        ValueError: it is none, with the field, its value and what would be right.
    """
    fields = read_mapping(value, _EXAMPLE)
    return make_part(SpeculativeConfig, _checked(fields)) if isinstance(fields, dict) else fields


_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 7}'


def _checked(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields by name, with the method in ``method``; refuses methods that do not exist here."""
    model = fields.get("model")
    if "method" not in fields and isinstance(model, str):  # as in vLLM
        named = model.strip("[]")
        fields["method"] = named if named in _OWN_METHODS + _FOREIGN_METHODS else "draft_model"
    method = fields.get("method")
    if method is None:
        raise ValueError(f"method is missing: name one of {', '.join(_OWN_METHODS)}, as in {_EXAMPLE}")
    if method not in _OWN_METHODS:
        reason = f": {_LAYER_SKIP}" if method == "layer_skip" else ""
        raise ValueError(f"method {method!r} is not supported{reason}; the methods are {', '.join(_OWN_METHODS)}")
    if isinstance(model, str) and model.strip("[]") == method:
        model = fields.pop("model")
    _check_model(method, fields)
    return fields


def _check_model(method: str, fields: dict[str, Any]) -> None:
    """Refuses a method that needs a model without one, and what is said of a model where none is taken."""
    if method in MODEL_METHODS:
        if not fields.get("model"):
            raise ValueError(f"method {method!r} needs a model: name it in model, as the option model does")
        if method != "draft_model" and "quantization" in fields:
            raise ValueError(f"quantization: heads of method {method!r} are not quantised; leave it out")
        return
    for name in ("model", "quantization", "revision"):
        if name in fields:
            raise ValueError(f"{name} {fields[name]!r}: method {method!r} takes no model; leave it out")


class SpeculativeOptions(OptionPart):
    """Speculative decoding: tokens are guessed, and several of a sequence are computed in one step."""

    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(_parse)] = Field(
        None,
        description="Draft tokens to verify in each step, as a mapping (JSON on the command line): method (ngram: what "
        "followed the same tokens earlier in the request; suffix: also in recent outputs of other requests; "
        "draft_model: what a smaller model of the same vocabulary says; eagle, eagle3: what a head trained for the "
        "model says; prediction: what requests predict alone, from which every method drafts), model (of draft_model, "
        "eagle and eagle3: as the option model; alone it means draft_model), quantization (of a draft_model) and "
        "revision (as the options of these names), "
        "num_speculative_tokens (most of a sequence in a step, 7), prompt_lookup_min and prompt_lookup_max (tokens to "
        "match, 2 and 4), suffix_decoding_max_tree_depth (24), suffix_decoding_max_cached_tokens (262144, of 24 "
        "bytes each), adaptive (whether the number follows what is accepted and what it costs, true). Answers do not "
        "change. Default: what requests predict.",
    )


# Options of structured output.


class StructuredOutputsConfig(OptionPart):
    """Defaults of the fields of structured output of these names. Names are those of vLLM."""

    model_config = ConfigDict(strict=True)

    #: Whether JSON has no spaces and line breaks between its tokens.
    disable_any_whitespace: bool = False
    #: Whether objects have no properties but those that their schema names, where it is silent about others.
    disable_additional_properties: bool = True
    #: Without effect: all mean the same by a grammar, and there is no other that would be fallen back to.
    backend: str = "auto"
    disable_fallback: bool = False


def _structured_outputs(value: Any) -> Any:
    fields = read_mapping({} if value is None else value, '{"disable_any_whitespace": true}')
    return make_part(StructuredOutputsConfig, fields) if isinstance(fields, dict) else fields


class StructuredOutputOptions(OptionPart):
    """The grammars of structured output."""

    structured_outputs_config: Annotated[StructuredOutputsConfig, BeforeValidator(_structured_outputs)] = Field(
        StructuredOutputsConfig(),
        description="What forms of JSON are where a request does not say, as a mapping (JSON on the command line): "
        "disable_any_whitespace (no spaces and line breaks between tokens, false), disable_additional_properties "
        "(objects have no properties but those that their schema names, where it is silent about others, true). "
        "backend and disable_fallback have no effect.",
    )
    structured_outputs_compile_seconds: float = Field(
        5.0,
        gt=0,
        le=3600,
        description="Seconds of processor time that compiling the schema or grammar of a request may take; one that "
        "takes longer is refused. It is compiled in a process beside the engine.",
    )


# The options of images in prompts.


def _limits(value: Any) -> Any:
    return read_mapping(value, '{"image": 4}') or None


class ImageOptions(OptionPart):
    """Images in prompts, of models that see them."""

    limit_mm_per_prompt: Annotated[
        dict[Literal["image", "video", "audio"], Annotated[int, Field(ge=0)]] | None, BeforeValidator(_limits)
    ] = Field(
        None,
        description='Most images of a prompt, as JSON: {"image": 4}; 0: none is taken. Default: as many as fit into '
        "the context and image_cache_bytes. Of video and audio, which vLLM's scripts name here, none is taken anyway.",
    )
    image_cache_bytes: ByteSize = Field(
        ByteSize(DEFAULT_IMAGE_CACHE),
        ge=1 << 20,
        description="Host memory of each worker for features of images, in bytes or with a unit (512MiB): those of "
        "prompts that run or come next, and of the latest others, so that an image which comes again is not computed "
        "again.",
    )
    image_step_ms: float = Field(
        50.0,
        gt=0,
        allow_inf_nan=False,
        description="Most milliseconds of a step that are spent on the features of images, beside its tokens, so that "
        "images do not stall decodes; at least one operation is computed. On a GPU a piece of an image is computed at "
        "once.",
    )


# The place of a worker among those that share one network.


@dataclass(frozen=True)
class ParallelLayout:
    """One worker's place: workers are numbered by stage, and within a stage by tensor-parallel rank."""

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    #: Layers of each stage; None: as even as possible.
    partition: tuple[int, ...] | None = None

    @classmethod
    def of(cls, options: ParallelOptions, rank: int) -> ParallelLayout:
        """The place of worker ``rank`` of an engine with these options."""
        partition = options.pipeline_layer_partition
        return cls(
            rank,
            options.tensor_parallel_size,
            options.pipeline_parallel_size,
            None if partition is None else tuple(partition),
        )

    @property
    def world_size(self) -> int:
        """Workers in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tp_rank(self) -> int:
        """Its number among the workers of its stage."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """Its pipeline stage."""
        return self.rank // self.tensor_parallel_size

    @property
    def is_last_stage(self) -> bool:
        """Whether its stage samples."""
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def output_rank(self) -> int:
        """The worker whose results count: the first of the last stage."""
        return self.world_size - self.tensor_parallel_size

    def layers(self, num_layers: int) -> range | None:
        """The layers of its stage; None: all of the network's ``num_layers``.

        Raises:
            ConfigError: the layers cannot be divided so.
        """
        stages = self.pipeline_parallel_size
        if stages == 1:
            return None
        if self.partition is not None:
            if sum(self.partition) != num_layers:
                raise ConfigError(
                    f"pipeline_layer_partition {list(self.partition)} has {sum(self.partition)} layers, but the "
                    f"network has {num_layers}"
                )
            first = sum(self.partition[: self.stage])
            return range(first, first + self.partition[self.stage])
        if num_layers < stages:
            raise ConfigError(f"pipeline_parallel_size ({stages}) is more than the network's {num_layers} layers")
        return range(self.stage * num_layers // stages, (self.stage + 1) * num_layers // stages)
