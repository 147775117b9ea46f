"""Options of the engine, one class for each group, so that a room can take the type of its group alone."""

from __future__ import annotations

import re
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
    field_serializer,
    field_validator,
    model_validator,
)

from octavo.core.errors import ConfigError, did_you_mean
from octavo.core.request import DEFAULT_IMAGE_CACHE

# Base class, and options that are mappings.


class OptionPart(BaseModel):
    """A group of options: unknown names are refused, and instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)


def read_mapping(value: Any, example: str) -> Any:
    """An option as a mapping, also from JSON or YAML, without fields that are None; raises ValueError."""
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
    """Raises ValueError, with name and value, if a field is unknown or invalid."""
    names = list(kind.model_fields)
    for name in fields:
        if name not in names:
            raise ValueError(f"unknown field {name!r}; {did_you_mean(name, names)}")
    try:
        return kind(**fields)
    except ValidationError as e:
        raise ValueError("; ".join(error_text(dict(error)) for error in e.errors())) from None


def error_text(error: dict[str, Any]) -> str:
    """An error of pydantic as a sentence: field, problem, value."""
    where = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}, not {error['input']!r}" if where else message


#: Default of ``max_logprobs``, and its maximum on a GPU.
MAX_LOGPROBS, MAX_LOGPROBS_ON_GPU = 100, 128


def _numbers(value: Any) -> Any:
    return [int(part) for part in value.split(",")] if isinstance(value, str) else value


def _separated(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


#: Of a replica: it computes long prompts, the answers to them, or any request.
ReplicaRole = Literal["prefill", "decode", "both"]

#: Minimum timeout of the first step, in seconds: on a GPU it compiles kernels.
FIRST_STEP_TIMEOUT = 900.0

#: Positive integers; in flags and variables separated by commas.
Sizes = Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(_numbers), Field(min_length=1)]

#: When CUDA graphs are captured, or for which batch sizes.
GraphCapture = Annotated[
    Annotated[Literal["lazy", "start"], Tag("when")] | Annotated[Sizes, Tag("sizes")],
    Discriminator(lambda value: "when" if value in ("lazy", "start") else "sizes"),
]

Quantization = Literal["auto", "none", "int8", "int4", "fp8", "gguf", "gptq", "awq", "compressed-tensors", "mxfp4"]


def store_location(url: str) -> str:
    """A ``kv_store`` without user, password and parameters; of a URL whose parts cannot be told, the scheme alone."""
    scheme, _, rest = url.partition("://")
    place = rest.partition("?")[0]
    if "@" not in place and "@" in rest:
        place = ""
    return f"{scheme}://{place.rpartition('@')[2]}"


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


class ModelOptions(OptionPart):
    """The model, its weights and its tokenizer."""

    model: str = Field(
        description="A built-in name (smollm2-135m), a Hugging Face folder, a .gguf file, or a model of the hub "
        "(owner/name, owner/name:Q4_K_M, owner/name/FILE.gguf), of Ollama (ollama:NAME) or LM Studio (lmstudio:NAME)."
    )
    task: Literal["auto", "generate", "embed", "classify", "score"] = Field(
        "auto",
        description="What the model is used for: text (generate), vectors (embed), class scores (classify), or the "
        "fit of two texts (score; a language model answers yes or no). auto: every task of the network's head.",
    )
    model_impl: Literal["auto", "octavo", "transformers"] = Field(
        "auto",
        description="Whose code computes the model: a network of octavo, or transformers' own (slower; needs the extra "
        "octavo[transformers]). auto: octavo's if there is one for the architecture, else transformers'.",
    )
    trust_remote_code: bool = Field(
        False,
        description="Run the modules with a model's own code that its config.json names (auto_map), through "
        "transformers. They have all rights of the engine's process.",
    )
    tokenizer: str | None = Field(
        None, description="Folder, GGUF file or hub model whose tokenizer is used instead of the model's own."
    )
    skip_tokenizer_init: bool = Field(
        False,
        description="Load no tokenizer. Prompts and answers are token ids; text, chat, stop strings and bad words are "
        "refused. HTTP clients find the ids among the logprobs (logprobs: 0).",
    )
    chat_template: str | None = Field(
        None, description="File of a Jinja chat template to use instead of the model's own."
    )
    mmproj: str = Field(
        "auto", min_length=1,
        description="The projector of a GGUF model's images: an mmproj .gguf file, or one of the hub "
        "(owner/name/FILE.gguf). auto: the one beside the model in its folder or repository; F16, BF16, F32 or Q8_0: "
        "the one of this type; none: text alone.",
    )  # fmt: skip
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights and activations. auto: the checkpoint's, but bfloat16 for GGUF files and instead "
        "of float16 on the CPU. half and float mean float16, which needs a GPU, and float32.",
    )
    quantization: Quantization = Field(
        "auto",
        description="int8, int4 (and fp8 on GPUs) quantise the matrices at load time. gguf computes with the "
        "quantised values of a GGUF file (on CPUs; 2, 3, 5 and 6 bits are widened to 8). none computes in dtype. auto "
        "means, on a CPU, gguf for a GGUF file and the stored numbers of a GPTQ, AWQ, MXFP4 or compressed-tensors "
        "checkpoint, else none. gptq, awq, compressed-tensors and mxfp4 mean auto for such a checkpoint.",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto", description="Weights from the checkpoint (auto, safetensors), or random ones for measurements (dummy)."
    )
    hf_overrides: Annotated[
        dict[str, Any] | None,
        BeforeValidator(lambda value: read_mapping(value, '{"max_position_embeddings": 65536}') or None),
    ] = Field(
        None,
        description="Values that replace those of config.json, as JSON; objects are merged. To extend a context: "
        '{"max_position_embeddings": 65536, "rope_parameters": {"rope_type": "yarn", "factor": 8.0, '
        '"original_max_position_embeddings": 8192}}.',
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Maximum tokens of prompt and output together. Default: the model's context length."
    )
    max_logprobs: int | None = Field(
        None, ge=-1,
        description="Maximum logprobs that a request may ask for at each position; -1: the whole vocabulary (on a GPU "
        f"at most {MAX_LOGPROBS_ON_GPU}). Default: {MAX_LOGPROBS}, over HTTP 20.",
    )  # fmt: skip
    logits_processors: Annotated[list[str] | None, BeforeValidator(_one_or_more)] = Field(
        None,
        description="Custom logits processors (module:Class, derived from LogitsProcessorPlugin). Requests activate "
        "them by their arguments in extra_args (over HTTP vllm_xargs).",
    )
    generation_config: str = Field(
        "auto",
        description="Source of default sampling parameters. auto: the model's generation_config.json, the keys of its "
        "GGUF file, or the authors' values for a built-in model. A folder: its generation_config.json. none (or "
        "vllm): no defaults.",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Seed for requests without a seed of their own.")

    @field_validator("quantization", mode="before")
    @classmethod
    def _none_is_the_default(cls, value: object) -> object:
        return "auto" if value is None else value

    @model_validator(mode="after")
    def _no_tokenizer_to_skip(self) -> Self:
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ValueError(f"skip_tokenizer_init loads no tokenizer; leave it out, or tokenizer ({self.tokenizer})")
        return self


#: Tokens.
MAX_BLOCK_SIZE = 1024


class CacheOptions(OptionPart):
    """The KV cache and the prefix cache."""

    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"] = Field(
        "auto",
        description="Type of the KV cache; auto: as dtype. int8 and fp8 (e4m3, GPUs only) take half the bytes of "
        "bfloat16, with a scale for each token and head.",
    )
    block_size: int = Field(16, ge=1, le=MAX_BLOCK_SIZE, description="Tokens in a KV cache block.")
    state_checkpoint_tokens: int = Field(
        512, ge=1, le=1 << 20,
        description="Of models with recurrent states: tokens between two checkpoints of a sequence's state, a multiple "
        "of block_size. Prompts with a cached prefix and preempted requests continue from the last one, or from the "
        "end of a prompt or an answer; each takes a state's memory. Models without attention "
        "have it as their block_size: either option sets both.",
    )  # fmt: skip
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1,
        description="On a GPU: share of its memory for weights, activations and KV cache together (default 0.9). On a "
        "CPU: share of the memory that is free after loading the weights, for the KV cache alone (default 0.5).",
    )  # fmt: skip
    kv_cache_memory_bytes: ByteSize | None = Field(
        None, ge=1, description="KV cache of each worker, in bytes or as 4GiB, instead of gpu_memory_utilization."
    )
    num_gpu_blocks_override: int | None = Field(
        None, ge=1, description="Number of KV cache blocks, instead of what fits. Refused if they do not fit."
    )
    swap_space: float | None = Field(
        None, ge=0, allow_inf_nan=False,
        description="Host memory in GiB for KV cache blocks of preempted requests, divided among the workers of a "
        "machine. Default: 4, or a tenth of the free memory if that is less; on a GPU at most as many blocks as its KV "
        "cache has, unless host_prefix_cache is on; 0 if no option moves blocks to the host. On a CPU the KV "
        "cache gets that much less.",
    )  # fmt: skip
    num_host_blocks_override: int | None = Field(
        None, ge=0, description="Number of host blocks, instead of swap_space. Refused if they do not fit."
    )
    watermark: float = Field(
        0.01, ge=0, lt=1, description="Share of blocks kept free at admission, so that running requests can grow."
    )
    enable_prefix_caching: bool = Field(
        True, description="Keep blocks of finished requests for prompts with the same prefix, until they are needed."
    )
    host_prefix_cache: bool = Field(
        False, description="Move evicted prefix cache blocks to free swap space, and back when they are hit."
    )
    cache_hold_share: float = Field(
        0.5, ge=0, le=1,
        description="Share of the KV cache blocks that the prefix cache holds longest for callers who ask for it "
        "(cache_control, prompt_cache_key, /v1/cache/pin); one client has half of it. Running requests take held "
        "blocks, too, after all others. 0: hints have no effect.",
    )  # fmt: skip
    kv_disk: str | None = Field(
        None,
        description="Folder of a store of KV cache blocks on local disk: prompts find their prefixes after a restart, "
        "and engines of this machine with the same model share it. Its files are as confidential as the prompts.",
    )
    kv_disk_bytes: ByteSize = Field(ByteSize(20 << 30), ge=1 << 20, description="Most bytes of kv_disk.")
    kv_store: str | None = Field(
        None,
        description="Store of KV cache blocks that machines share: redis://HOST:PORT/0, or rediss:// for TLS, of Redis "
        "or Valkey. Needs the extra store.",
        repr=False,
    )
    shared_prefix: Annotated[list[str] | None, BeforeValidator(_one_or_more)] = Field(
        None,
        description="File with the text of a prefix of many prompts, such as a system prompt as the chat template "
        "renders it. Its blocks are computed at start and pinned in the prefix cache. Repeat the flag, or give a list, "
        "for several.",
    )

    @field_serializer("kv_store", when_used="json")
    def _without_password(self, url: str | None) -> str | None:
        """For reports and step dumps."""
        return None if url is None else store_location(url)

    @property
    def has_swap_space(self) -> bool:
        """Whether host blocks are allowed; their number depends on the memory."""
        if self.num_host_blocks_override is not None:
            return self.num_host_blocks_override > 0
        return self.swap_space is None or self.swap_space > 0

    @property
    def has_stores(self) -> bool:
        """Whether KV stores keep blocks outside the engine."""
        return self.kv_disk is not None or self.kv_store is not None

    @model_validator(mode="after")
    def _caches_have_a_source_and_a_place(self) -> Self:
        if self.shared_prefix and not self.enable_prefix_caching:
            raise ValueError(
                f"shared_prefix ({', '.join(self.shared_prefix)}) needs enable_prefix_caching, which is off"
            )
        for name in ("kv_disk", "kv_store"):
            if getattr(self, name) is not None and not self.enable_prefix_caching:
                raise ValueError(f"{name} needs enable_prefix_caching, which is off")
        if self.host_prefix_cache and not self.enable_prefix_caching:
            raise ValueError("host_prefix_cache needs enable_prefix_caching: it holds the blocks that this one caches")
        if self.host_prefix_cache and not self.has_swap_space:
            raise ValueError("host_prefix_cache needs swap space: set swap_space, or num_host_blocks_override, above 0")
        return self


class AdapterOptions(OptionPart):
    """LoRA and prompt adapters, which requests name and which share the model's weights."""

    enable_lora: bool = Field(False, description="Serve LoRA adapters beside the base model.")
    max_loras: int = Field(8, ge=1, le=4096, description="Maximum LoRA adapters on the device, and so in one step.")
    max_lora_rank: int = Field(16, ge=1, le=256, description="Maximum rank of a LoRA adapter.")
    max_cpu_loras: int | None = Field(
        None, ge=1, le=65536, description="Maximum LoRA adapters in host and device memory. Default: 4 x max_loras."
    )
    enable_prompt_adapter: bool = Field(False, description="Serve adapters of prompt tuning and prefix tuning.")
    max_prompt_adapters: int = Field(8, ge=1, le=4096, description="Maximum prompt adapters in memory.")
    max_prompt_adapter_token: int = Field(128, ge=1, le=65536, description="Maximum virtual tokens of an adapter.")

    @property
    def num_virtual_tokens(self) -> int:
        """Maximum virtual tokens of all prompt adapters in memory."""
        return self.max_prompt_adapters * self.max_prompt_adapter_token if self.enable_prompt_adapter else 0

    @property
    def num_host_loras(self) -> int:
        """Maximum LoRA adapters in host memory, including those on the device."""
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
    """The device and its kernels."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device that runs the model; auto: a CUDA GPU if there is one."
    )
    kernels: Literal["auto", "cpu", "triton", "reference"] = Field(
        "auto", description="Kernel backend; auto: the fastest one for the device."
    )
    deterministic: bool = Field(
        False,
        description="On a GPU: batch-invariant results, at some cost in speed: the same tokens and logprobs, bit for "
        "bit, whatever else runs. On a CPU results always are.",
    )
    enforce_eager: bool = Field(False, description="On a GPU: launch every kernel without CUDA graphs.")
    graph_capture: GraphCapture = Field(
        "lazy",
        description="On a GPU: batch sizes of decode steps with a CUDA graph, and when to capture it. lazy: 1, 2, 4, "
        "then every 8th and wider steps up to max_num_seqs, each when first needed. start: the same at start. "
        "1,2,4,8: these sizes when first needed; larger batches run without a graph.",
    )
    time_kernels: bool = Field(
        False, description="Time every kernel call, to know the share of a step outside kernels."
    )
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads, divided among a machine's workers. Default: all cores."
    )
    log_stats_interval: float | None = Field(
        None, ge=0, allow_inf_nan=False,
        description="Seconds between status lines in the log (logger octavo, level info) while the engine is busy: "
        "requests, tokens per second, KV cache, prefix hits; 0: none. Default: none; 5 for octavo serve.",
    )  # fmt: skip
    step_dumps: Literal["lengths", "tokens", "none"] = Field(
        "lengths",
        description="What a dump of a failed step tells of prompts and answers (folder dumps in OCTAVO_CACHE, for "
        "octavo view and octavo simulate --replay): their lengths, or their token ids too. none: no dumps.",
    )
    pin_threads: bool = Field(
        False, description="Pin each computing CPU thread to a core of its own, on machines that do nothing else."
    )

    @field_validator("graph_capture", mode="before")
    @classmethod
    def _no_sizes_are_the_default(cls, value: object) -> object:
        return "lazy" if value is None else value

    @property
    def graph_sizes(self) -> list[int] | None:
        return self.graph_capture if isinstance(self.graph_capture, list) else None


class ParallelOptions(OptionPart):
    """How many workers share the model, and where they run."""

    tensor_parallel_size: int = Field(
        1, ge=1, le=1024, description="Workers that share the matrices and heads of each layer."
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, le=1024, description="Pipeline stages, each with a part of the layers."
    )
    pipeline_layer_partition: list[int] | None = Field(
        None, description="Layers of each pipeline stage, such as [8, 8, 14]. Default: divided evenly."
    )
    distributed_executor_backend: Literal["uni", "mp", "ray", "external_launcher"] | None = Field(
        None,
        description="Where workers run: in this process (uni), in processes of this machine (mp), as Ray actors (ray), "
        "or in processes of a launcher such as torchrun (external_launcher). Default: uni for one worker, mp for as "
        "many as this machine has devices, else ray.",
    )

    data_parallel_size: int = Field(
        1, ge=1, le=1024, description="Replicas of the engine behind one server; they share threads and memory."
    )
    data_parallel_routing: Literal["prefix", "least_loaded", "round_robin"] = Field(
        "prefix",
        description="Choice of a replica for a request. prefix: the one that probably caches its prefix, unless it has "
        "many more tokens to compute. least_loaded: the one with the fewest tokens to compute. round_robin: the next.",
    )
    replica_roles: Annotated[list[ReplicaRole] | None, BeforeValidator(_separated)] = Field(
        None,
        description="What each replica is for, such as [prefill, decode]. One for prefill computes a long prompt; when "
        "its blocks are in kv_disk or kv_store, it moves to one for decode, which fetches them. Default: both.",
    )
    engine_restarts: int = Field(
        3, ge=0, le=1_000_000,
        description="Maximum restarts of each replica's engine core within ten minutes after it died or hung; its "
        "requests continue with the same bits. Beyond that, or with 0, the engine ends with its last core.",
    )  # fmt: skip
    standby_engines: int = Field(
        0, ge=0, le=64, description="Loaded engine cores in reserve for one that dies; each takes an engine's memory."
    )
    step_timeout: float = Field(
        300.0, gt=0,
        description="Seconds without a step, while requests are open, after which an engine process or worker process "
        f"counts as hanging and is killed; {FIRST_STEP_TIMEOUT:g} for the first step. On Linux, time spent waiting for "
        "a processor does not count. A step with the full token budget of a 7B model takes two minutes on a few cores.",
    )  # fmt: skip
    check_plans: bool = Field(
        True,
        description="With external_launcher: compare the plans of all processes before every step. If one got other "
        "requests, the engine ends with an error instead of a collective that never ends.",
    )
    check_ranks: int | None = Field(
        None, ge=0, le=1 << 20,
        description="With tensor_parallel_size above 1: steps between comparisons of the workers' sampled tokens; a "
        "difference ends the engine with an error that names ranks and steps. 0: never. Default: 1; with "
        "external_launcher 0 unless check_plans is on.",
    )  # fmt: skip

    @property
    def rank_check_interval(self) -> int:
        """Steps between comparisons of the tokens that tensor-parallel ranks sample; 0: never."""
        if self.tensor_parallel_size == 1:
            return 0
        if self.check_ranks is not None:
            return self.check_ranks
        return int(self.distributed_executor_backend != "external_launcher" or self.check_plans)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def moves_decodes(self) -> bool:
        """Whether requests move to another replica when their prompts are computed and stored."""
        return self.replica_roles is not None and "prefill" in self.replica_roles

    @model_validator(mode="after")
    def _each_replica_has_a_role(self) -> Self:
        roles = self.replica_roles
        if roles is None:
            return self
        if len(roles) != self.data_parallel_size:
            raise ValueError(
                f"replica_roles ({', '.join(roles)}) must name {self.data_parallel_size} roles, one for each replica "
                "of data_parallel_size"
            )
        if set(roles) == {"prefill"}:
            raise ValueError("replica_roles needs at least one replica for decode or both, not prefill alone")
        return self

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


# The scheduler.

#: Defaults of ``max_num_batched_tokens``: in general, and on a CPU with batching=mixed.
TOKEN_BUDGET, CPU_TOKEN_BUDGET = 2048, 512
#: For encoders on a CPU: larger products are not faster, and a new text waits for the step.
ENCODER_TOKEN_BUDGET = 1024


def _shares(value: Any) -> Any:
    return dict(part.rpartition("=")[::2] for part in value.split(",")) if isinstance(value, str) else value


#: Positive numbers by name; in flags and variables ``name=number``, separated by commas.
Weights = Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], BeforeValidator(_shares)]


#: Default of ``max_num_seqs``; and "auto" as a number, until ``SchedulerOptions`` resolves it.
MAX_NUM_SEQS, _AUTO = 256, 1 << 62


class SchedulerOptions(OptionPart):
    """How steps are filled, the order of requests, and preemption."""

    max_num_seqs: Annotated[int, BeforeValidator(lambda value: _AUTO if value == "auto" else value)] = Field(
        MAX_NUM_SEQS, ge=1,
        description="Maximum concurrent sequences. A lower max_num_batched_tokens lowers the default. auto: the "
        "default, with adapt_num_seqs.",
    )  # fmt: skip
    adapt_num_seqs: bool = Field(
        False,
        description="Learn from the times of steps and preemptions how many concurrent sequences bring the highest "
        "throughput, and admit no more, up to max_num_seqs. Answers do not change.",
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=1,
        description="Token budget: maximum tokens computed in a step, prefill and decode together. Default: "
        f"{TOKEN_BUDGET}; {CPU_TOKEN_BUDGET} on a CPU with batching=mixed; {ENCODER_TOKEN_BUDGET} for encoders on a "
        "CPU; at least max_num_seqs, and the context length if prompts are computed whole. An encoder computes a "
        "longer text in a step of its own.",
    )  # fmt: skip
    max_num_encoder_input_tokens: int | None = Field(
        None, ge=1,
        description="Maximum encoder input tokens in a step of an encoder-decoder model, beside its other tokens, so "
        "that long inputs do not delay decodes. An input is computed whole; a longer one alone. Default: "
        "max_num_batched_tokens.",
    )  # fmt: skip
    batching: Literal["mixed", "prefill_first"] = Field(
        "mixed",
        description="How steps are filled. mixed: decodes first, then prompt chunks, under one token budget. "
        "prefill_first: whole prompts in steps of their own, before decodes.",
    )
    enable_chunked_prefill: bool = Field(
        True, description="Split prompts over steps to fill the token budget. Off: a prompt takes one step."
    )
    scheduling_policy: str = Field(
        "fcfs",
        description="Order of admission, preemption and return: fcfs (arrival), static (the request's priority, lower "
        "first), sjf (smallest max_tokens), ldf (most tokens of prompt and output), lcfs (latest arrival), srpt "
        "(fewest remaining tokens, predicted from finished requests), boost (arrival, but short requests earlier), "
        "fair (user with the least service), deadline (next deadline that can be met), mlfq (least service, in "
        "queues), or module:Class.",
    )
    user_weights: Weights | None = Field(
        None, description="With scheduling_policy fair: shares of users, as alice=2,bob=0.5; others have 1."
    )
    ttft_target: float | None = Field(
        None, gt=0,
        description="With scheduling_policy deadline: seconds from arrival to the first token, for requests without "
        "a ttft_target of their own. Default: no deadline.",
    )  # fmt: skip
    tpot_target: float | None = Field(
        None, gt=0,
        description="With scheduling_policy deadline: seconds between later tokens, for requests without a tpot_target "
        "of their own. Default: no deadline.",
    )  # fmt: skip
    aging_limit: float | None = Field(
        60.0,
        ge=0,
        description="Seconds after which no later arrival overtakes a request; none: no limit. Without effect under "
        "scheduling_policy fair, which lets no user starve.",
    )
    preemption_mode: Literal["auto", "recompute", "swap", "by_sequences"] = Field(
        "auto",
        description="What happens to the blocks of a preempted request: recompute (drop and compute again) or swap "
        "(move to host memory and back). by_sequences: swap for several sequences, recompute for one. auto: swap for "
        "several, and for one whichever took less time so far.",
    )
    preemption_victim: Literal["last", "least_computed", "most_blocks"] = Field(
        "last",
        description="Which of the requests with lower priority than the one that needs blocks is preempted: the last "
        "in the policy's order, the one with the fewest computed tokens, or the one with the most blocks.",
    )
    priority_preemption: bool = Field(
        False, description="Let waiting requests preempt running ones of lower priority (scheduling_policy static)."
    )
    scheduler_delay_factor: float = Field(
        0.0, ge=0,
        description="With batching=prefill_first: admit waiting prompts only after the first of them has waited this "
        "many times the duration of the last prompt step, so that more arrive.",
    )  # fmt: skip
    max_num_partial_prefills: int | None = Field(
        None, ge=1, description="Maximum prompts in prefill at once. Default: as many as the token budget holds."
    )
    long_prefill_token_threshold: int = Field(
        0, ge=0,
        description="Prompts with more tokens are long: short ones overtake them, one is computed at a time, with at "
        "most this many tokens a step. 0: off.",
    )  # fmt: skip
    async_scheduling: bool | None = Field(
        None, description="Plan the next step while the device computes this one. Default: true on a GPU, else false."
    )

    jump_forward: bool = Field(
        True,
        description="With structured outputs: append tokens that the grammar forces without sampling, and compute them "
        "in one step. Answers do not change. Off with async_scheduling.",
    )

    def plans_ahead(self, device: str) -> bool:
        """Whether ``async_scheduling`` is on for a device ("cpu" or "cuda")."""
        return device != "cpu" if self.async_scheduling is None else self.async_scheduling

    @property
    def cuts_prompts(self) -> bool:
        """Whether prompts may be computed in chunks of any length."""
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
        if self.max_num_seqs == _AUTO:
            object.__setattr__(self, "max_num_seqs", MAX_NUM_SEQS)
            object.__setattr__(self, "adapt_num_seqs", True)
            self.model_fields_set.remove("max_num_seqs")
            self.model_fields_set.add("adapt_num_seqs")
        if (budget := self.max_num_batched_tokens) is not None and budget < self.max_num_seqs:
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
            if (value := getattr(self, name)) is not None and chosen != policy and ":" not in chosen:
                raise ValueError(f"{name} ({value}) is of scheduling_policy {policy!r}; {chosen!r} does not look at it")
        return self


# Speculative decoding.

#: Methods whose drafts come from a network on the workers, named by ``model``; ``mtp`` is another, with or without one.
MODEL_METHODS = ("draft_model", "eagle", "eagle3")
_FOREIGN_METHODS = ("medusa", "mlp_speculator")
_OWN_METHODS = ("ngram", "suffix", *MODEL_METHODS, "mtp", "prediction", "none")
#: vLLM's names of ``mtp``, such as deepseek_mtp.
_MTP_OF_FAMILY = re.compile(r"\w+_mtp")
#: Draft tokens of ``mtp`` by default: one module drafts further tokens from its own results, ever less surely.
MTP_TOKENS = 3
#: Self-speculation, see docs/speculation.md.
_LAYER_SKIP = "the first layers of a model that is not trained for it seldom say what the whole model says"


class SpeculativeConfig(OptionPart):
    """How drafts are made; names of fields are vLLM's where it has them."""

    model_config = ConfigDict(strict=True)

    #: ``ngram``: what followed the same tokens earlier in the sequence. ``suffix``: also in recent outputs of other
    #: requests. ``draft_model``: a smaller model with the same vocabulary. ``eagle``, ``eagle3``: a head trained on the
    #: model's hidden states. ``mtp``: layers for multi-token prediction in the model's checkpoint, or with ``model`` an
    #: assistant of Gemma 4. ``prediction``: the request's predicted output, which the other methods use, too. ``none``:
    #: no method, not even the model's own.
    method: Literal["ngram", "suffix", "prediction", "draft_model", "eagle", "eagle3", "mtp", "none"]
    #: Maximum draft tokens of a sequence in a step; 7 and the token before them fill a tile of the CPU kernels. Of
    #: ``mtp`` 3.
    num_speculative_tokens: int = Field(7, ge=1, le=64)
    #: Bounds of the match of ``ngram``, in tokens.
    prompt_lookup_min: int = Field(2, ge=1, le=32)
    prompt_lookup_max: int = Field(4, ge=1, le=32)
    #: Of ``suffix``: maximum tokens of a match, and of the outputs that are kept.
    suffix_decoding_max_tree_depth: int = Field(24, ge=2, le=256)
    suffix_decoding_max_cached_tokens: int = Field(1 << 18, ge=1 << 10, le=1 << 28)
    #: Of ``draft_model``, ``eagle``, ``eagle3`` and an assistant, as the option ``model``; ``quantization`` of
    #: ``draft_model`` only.
    model: str | None = None
    quantization: Quantization | None = None
    revision: str | None = None
    #: Whether the draft length adapts to acceptance and to the cost of a step.
    adaptive: bool = True

    @property
    def drafts_on_workers(self) -> bool:
        return self.method in (*MODEL_METHODS, "mtp")

    @model_validator(mode="before")
    @classmethod
    def _bounds_meet(cls, fields: Any) -> Any:
        """One bound alone moves a conflicting default of the other."""
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


def _speculative_config(value: Any) -> Any:
    if isinstance(value, str) and value.strip() in ("mtp", "none"):  # methods without further fields
        value = {"method": value.strip()}
    fields = read_mapping(value, _EXAMPLE)
    return make_part(SpeculativeConfig, _with_method(fields)) if isinstance(fields, dict) else fields


_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 7}'


def _with_method(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with ``method`` filled in; raises ValueError if the method does not fit them."""
    model = fields.get("model")
    if "method" not in fields and isinstance(model, str):  # as in vLLM
        name = model.strip("[]")
        is_method = name in _OWN_METHODS + _FOREIGN_METHODS or _MTP_OF_FAMILY.fullmatch(name)
        fields["method"] = name if is_method else "draft_model"
    method = fields.get("method")
    if isinstance(method, str) and _MTP_OF_FAMILY.fullmatch(method):
        if isinstance(model, str) and model.strip("[]") == method:
            model = fields["model"] = "mtp"
        method = fields["method"] = "mtp"
    if method is None:
        raise ValueError(f"method is missing: name one of {', '.join(_OWN_METHODS)}, as in {_EXAMPLE}")
    if method not in _OWN_METHODS:
        reason = f": {_LAYER_SKIP}" if method == "layer_skip" else ""
        raise ValueError(f"method {method!r} is not supported{reason}; the methods are {', '.join(_OWN_METHODS)}")
    if isinstance(model, str) and model.strip("[]") == method:
        model = fields.pop("model")
    if method in MODEL_METHODS:
        if not fields.get("model"):
            raise ValueError(f"method {method!r} needs a model: name it in model, as the option model does")
        if method != "draft_model" and "quantization" in fields:
            raise ValueError(f"quantization: heads of method {method!r} are not quantised; leave it out")
        return fields
    if method == "mtp":
        if "quantization" in fields:
            raise ValueError("quantization: assistants of method 'mtp' are not quantised; leave it out")
        if "revision" in fields and not fields.get("model"):
            raise ValueError("revision: without a model, method 'mtp' drafts with layers of the model's own checkpoint")
        return {"num_speculative_tokens": MTP_TOKENS, **fields}
    for name in ("model", "quantization", "revision"):
        if name in fields:
            raise ValueError(f"{name} {fields[name]!r}: method {method!r} takes no model; leave it out")
    return fields


class SpeculativeOptions(OptionPart):
    """Speculative decoding: draft tokens are verified together in one step."""

    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(_speculative_config)] = Field(
        None,
        description="Speculative decoding, as a mapping (JSON on the command line). method: ngram (what followed the "
        "same tokens earlier in the request), suffix (also in recent outputs of other requests), draft_model (a "
        "smaller model of the same vocabulary), eagle or eagle3 (a head trained for the model), mtp (layers for "
        "multi-token prediction that the checkpoint brings; with model, an assistant of Gemma 4), prediction (only the "
        "predictions that requests bring, which every method uses), or none. model, revision: as the options of these "
        "names, for draft_model, eagle, eagle3 and an assistant; model alone means draft_model, or mtp if it is an "
        "assistant. quantization: as the option, for draft_model. num_speculative_tokens: "
        "maximum draft tokens of a sequence in a step (7; mtp 3). prompt_lookup_min, prompt_lookup_max: tokens to "
        "match (2, 4). suffix_decoding_max_tree_depth (24), suffix_decoding_max_cached_tokens (262144, 24 bytes each). "
        "adaptive: adapt the draft length to acceptance and cost (true). Answers do not change. Default: mtp if the "
        "checkpoint has such layers and memory allows, else only the predictions of requests.",
    )


# Structured output.


class StructuredOutputsConfig(OptionPart):
    """Defaults of a request's fields of the same names, which are vLLM's."""

    model_config = ConfigDict(strict=True)

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    #: Without effect: there is one backend.
    backend: str = "auto"
    disable_fallback: bool = False


def _structured_outputs(value: Any) -> Any:
    fields = read_mapping({} if value is None else value, '{"disable_any_whitespace": true}')
    return make_part(StructuredOutputsConfig, fields) if isinstance(fields, dict) else fields


class StructuredOutputOptions(OptionPart):
    """Grammars of structured output."""

    structured_outputs_config: Annotated[StructuredOutputsConfig, BeforeValidator(_structured_outputs)] = Field(
        StructuredOutputsConfig(),
        description="Defaults for JSON outputs, as a mapping (JSON on the command line): disable_any_whitespace (no "
        "spaces and line breaks between tokens, false), disable_additional_properties (only the properties that the "
        "schema names, where it is silent about others, true). backend and disable_fallback have no effect.",
    )
    structured_outputs_compile_seconds: float = Field(
        5.0, gt=0, le=3600,
        description="Maximum processor seconds to compile the schema or grammar of a request, in a process beside the "
        "engine. Slower ones are refused.",
    )  # fmt: skip


# Images.


class ImageOptions(OptionPart):
    """Images in prompts, for models with vision."""

    limit_mm_per_prompt: Annotated[
        dict[Literal["image", "video", "audio"], Annotated[int, Field(ge=0)]] | None,
        BeforeValidator(lambda value: read_mapping(value, '{"image": 4}') or None),
    ] = Field(
        None,
        description='Maximum images of a prompt, as JSON: {"image": 4}; 0: none, and the image tower is not loaded. '
        "Default: as many as fit into the context and image_cache_bytes. Video and audio are accepted for vLLM's "
        "scripts, and never taken.",
    )
    image_cache_bytes: ByteSize = Field(
        ByteSize(DEFAULT_IMAGE_CACHE), ge=1 << 20,
        description="Host memory of each worker for image features, in bytes or with a unit (512MiB): of running and "
        "next prompts, and of recent images, so that a repeated image is not computed again.",
    )  # fmt: skip
    image_step_ms: float = Field(
        50.0, gt=0, allow_inf_nan=False,
        description="Milliseconds that images may add to a step beside decodes, by their features and by the tokens "
        "that stand for these; at least some rows of an operation are computed, and eight tokens. On a GPU a piece of "
        "an image is computed at once.",
    )  # fmt: skip


# The place of a worker.


@dataclass(frozen=True)
class ParallelLayout:
    """A worker's place: ranks count stage by stage, and within a stage by tensor-parallel rank."""

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    partition: tuple[int, ...] | None = None

    @classmethod
    def of(cls, options: ParallelOptions, rank: int) -> ParallelLayout:
        partition = options.pipeline_layer_partition
        sizes = options.tensor_parallel_size, options.pipeline_parallel_size
        return cls(rank, *sizes, None if partition is None else tuple(partition))

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def output_rank(self) -> int:
        """The worker whose results count: the first of the last stage."""
        return self.world_size - self.tensor_parallel_size

    def layers(self, num_layers: int) -> range | None:
        """The layers of its stage; None: all. Raises ConfigError if they cannot be divided."""
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
