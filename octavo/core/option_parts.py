"""The parts of the engine's options: a room takes the type of its part alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ByteSize, Discriminator, Field, Tag, field_validator, model_validator

from octavo.core.option_part import OptionPart, read_mapping

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
