"""Architectures without a network here, through transformers' own code (vLLM: the Transformers modeling backend).

``read_transformers_config`` builds the model without memory and runs it on a few tokens: the calls of its attention
function give the KV cache of its layers, and a model that cannot be served is refused with the reason.
``TransformersForCausalLM`` runs the model on the flat rows of a step. Attention over the paged cache, linear layers and
experts are operations of ``Kernels``; the rest is torch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from octavo.config.kv_spec import KVSpec, group_layers
from octavo.core.dtypes import DType
from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch, make_batch
from octavo.kernels.interface import Array, AttentionSpec, Kernels, LayerCache, PackedWeight
from octavo.kernels.torch_backend import from_torch, torch_dtype
from octavo.layers.layer import LayerContext, Weight
from octavo.models.config_files import ConfigReader, read_json, read_token_ids
from octavo.models.network import Network, ResidualReader

logger = logging.getLogger("octavo.startup")

#: Names of the attention and experts functions below in transformers' interfaces. The second one also has a function
#: for masks, which is called in the probe alone; with the first one transformers makes no masks.
_PAGED, _PROBE = "octavo", "octavo_probe"
#: Head sizes are padded with zeros to a multiple of this number, which kernels need.
_HEAD_UNIT = 8
#: Numbers that torch's elementwise functions on a CPU compute at once. Rows of a multiple are computed alike wherever
#: they lie; the last few numbers of others are computed by other code, which may round otherwise.
_VECTOR = 64
#: Names of config.json for the longest context.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
#: Scaled rotary positions that depend on the longest sequence of a step, and so on other requests.
_UNSTEADY_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class AttentionCall:
    """A call of the attention function in each forward of the model."""

    #: Index of its KV cache.
    cache: int
    #: Whether its keys and values are those of an earlier call, which has written them.
    shares: bool
    kv_heads: int
    #: Of queries and keys, and of values.
    head_dim: int
    value_dim: int
    window: int | None = None

    @property
    def cached_dim(self) -> int:
        """Head size of the KV cache, which has keys and values of one size."""
        return -(-max(self.head_dim, self.value_dim) // _HEAD_UNIT) * _HEAD_UNIT


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(ModelConfig):
    #: Folder of config.json, and values that replace those in it.
    folder: str
    overrides: Mapping[str, Any]
    trust_remote_code: bool
    #: In the order of the forward.
    calls: tuple[AttentionCall, ...]
    #: Names of linear layers whose matrix other modules read, so that torch keeps it.
    read_directly: tuple[str, ...]
    #: The model's tensors.
    held: tuple[Weight, ...]


# The attention and experts functions that transformers calls, and the forward that is running.


class _Forward(Protocol):
    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        """Attention of q [1, H, T, D], k [1, K, T, D] and v [1, K, T, V]: [1, T, H, V]."""
        ...


_running: ContextVar[_Forward] = ContextVar("running")


@contextmanager
def _run(forward: _Forward) -> Iterator[None]:
    token = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    return _running.get().attend(module, query, key, value, attention_mask, **options), None


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    packed: _PackedExperts | _GatedExperts | None = getattr(module, "packed_experts", None)
    return torch.zeros_like(hidden_states) if packed is None else packed(hidden_states, top_k_index, top_k_weights)


for _name in (_PAGED, _PROBE):
    ALL_ATTENTION_FUNCTIONS.register(_name, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(_PROBE, lambda **arguments: _Mask.of(**arguments))
ALL_EXPERTS_FUNCTIONS.register(_PAGED, _experts)


# config.json, and the probe.


class _Refused(Exception):
    """Why a model cannot be served."""


def read_transformers_config(
    folder: Path, overrides: Mapping[str, Any], generation: Mapping[str, Any], trust_remote_code: bool
) -> TransformersConfig:
    """The configuration of a model that transformers computes.

    Args:
        folder: with config.json, and the modules with the model's own code if its ``auto_map`` names any.
        overrides: values that replace those of config.json.
        generation: the content of generation_config.json.
        trust_remote_code: whether the folder's modules may be run.

    Raises:
        UnsupportedModelError: the model cannot be served; the message says why.
    """
    raw = {**read_json(folder / "config.json"), **overrides}
    name = str((raw.get("architectures") or [raw.get("model_type")])[0])
    try:
        _check_files(raw, trust_remote_code)
        hf_config = _load_hf_config(folder, overrides, trust_remote_code)
        with torch.device("meta"):
            model = _make_model(hf_config, trust_remote_code)
        _check_model(name, model)
        with torch.no_grad():
            calls, read_directly = _Probe.of(model)
    except _Refused as e:
        raise UnsupportedModelError(
            f"{name} does not run through transformers' code (version {transformers.__version__}): {e}"
        ) from None
    text, heads = model.config.get_text_config(), model.get_output_embeddings()
    reader = ConfigReader({**text.to_dict(), **raw}, folder / "config.json", dict(generation))
    widths = [module.out_features for module in model.modules() if type(module) is nn.Linear and module is not heads]
    return TransformersConfig(
        architecture=name,
        model_impl="transformers",
        vocab_size=heads.out_features,
        hidden_size=heads.in_features,
        intermediate_size=max(widths, default=heads.in_features),
        num_layers=1 + max(call.cache for call in calls),
        num_heads=int(getattr(text, "num_attention_heads", 0) or max(call.kv_heads for call in calls)),
        num_kv_heads=max(call.kv_heads for call in calls),
        head_dim=max(call.cached_dim for call in calls),
        max_position=_longest_context(text),
        tie_word_embeddings=heads.weight is model.get_input_embeddings().weight,
        checkpoint_dtype=str(getattr(hf_config, "dtype", None) or "float32").removeprefix("torch."),
        eos_token_ids=read_token_ids(reader, "eos_token_id"),
        bos_token_id=next(iter(read_token_ids(reader, "bos_token_id")), None),
        folder=str(folder),
        overrides=dict(overrides),
        trust_remote_code=trust_remote_code,
        calls=calls,
        read_directly=read_directly,
        held=tuple(_held(model)),
    )


def _check_files(raw: Mapping[str, Any], trust_remote_code: bool) -> None:
    known = raw.get("model_type") in transformers.CONFIG_MAPPING
    if raw.get("auto_map") and not known and not trust_remote_code:
        code = ", ".join(sorted({str(entry).partition(".")[0] + ".py" for entry in raw["auto_map"].values()}))
        raise _Refused(
            f"it has code of its own ({code} beside config.json), which runs with all rights of this process: give "
            "trust_remote_code (--trust-remote-code) if you trust its authors"
        )
    if not raw.get("auto_map") and not known:
        raise _Refused(f"transformers has no model_type {raw.get('model_type')!r}; a newer version may have it")
    if raw.get("quantization_config") or raw.get("compression_config"):
        method = (raw.get("quantization_config") or raw["compression_config"]).get("quant_method")
        raise _Refused(f"its checkpoint is quantised ({method}): take one in float32, bfloat16 or float16")


def _load_hf_config(folder: Path, overrides: Mapping[str, Any], trust_remote_code: bool) -> Any:
    try:
        hf_config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True, **overrides
        )
    except Exception as e:  # whatever the code of a model's own configuration raises
        raise _Refused(f"{type(e).__name__}: {e}") from None
    if getattr(hf_config, "is_encoder_decoder", False):
        raise _Refused("encoder-decoder models need cross attention")
    if hf_config.get_text_config() is not hf_config:
        raise _Refused("it reads images or recordings beside text")
    return hf_config


def _make_model(hf_config: Any, trust_remote_code: bool, **options: Any) -> Any:
    """The model with random weights, on the device of the context."""
    try:
        model = transformers.AutoModelForCausalLM.from_config(
            hf_config, attn_implementation=_PROBE, trust_remote_code=trust_remote_code, **options
        )
    except Exception as e:  # such as an architecture without a language-model head
        raise _Refused(f"{type(e).__name__}: {e}") from None
    return _prepared(model)


def _prepared(model: Any) -> Any:
    model.eval().requires_grad_(False)
    model.config._experts_implementation = _PAGED
    # Routers' logits are for training.
    model.config.output_router_logits = False
    return model


def _check_model(name: str, model: Any) -> None:
    if type(model).__name__ != name and name.removesuffix("Model") == name and "For" in name:
        raise _Refused(f"only language models are; transformers would make a {type(model).__name__} of it")
    if getattr(model, "_is_stateful", False) or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise _Refused("it has recurrent layers, which keep a state instead of keys and values")
    body = _body(model)
    if "position_ids" not in inspect.signature(body.forward).parameters:
        raise _Refused(f"the forward of {type(body).__name__} takes no position_ids")
    if type(model.get_output_embeddings()) is not nn.Linear:
        raise _Refused("its head is no linear layer")
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    tables = [table for table in rope.values() if isinstance(table, dict)] or [rope]
    if any(table.get("mrope_section") for table in tables):
        raise _Refused("its tokens have several positions each (mrope_section)")
    for table in tables:
        if table.get("rope_type") in _UNSTEADY_ROPE:
            raise _Refused(
                f"rotary positions of type {table['rope_type']!r} depend on the longest sequence of a step: an answer "
                "would depend on other requests"
            )


def _body_name(model: Any) -> str:
    """The attribute with the model's part before the head."""
    for name in (model.base_model_prefix, "model"):
        if name and getattr(model, name, None) is not None:
            return str(name)
    raise _Refused(f"{type(model).__name__} has no part without the head")


def _body(model: Any) -> Any:
    return getattr(model, _body_name(model))


def _longest_context(text: Any) -> int:
    for name in _LENGTHS:
        if isinstance(length := getattr(text, name, None), int) and length > 0:
            return length
    raise UnsupportedModelError(
        "config.json names no context length (max_position_embeddings): give one by hf_overrides, such as "
        '{"max_position_embeddings": 4096}'
    )


def _held(model: Any) -> Iterator[Weight]:
    text, embedding, head = model.config.get_text_config(), model.get_input_embeddings(), model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        shape, active = tuple(parameter.shape), 1.0
        kind: Any = "linear" if len(shape) > 1 else "vector"
        if parameter is head.weight:
            kind = "head"
        elif parameter is embedding.weight:
            kind = "embedding"
        elif len(shape) == 3:  # of all experts
            active = min(1.0, (getattr(text, "num_experts_per_tok", None) or shape[0]) / shape[0])
        yield Weight(name, shape, kind, "", active=active)


@dataclass(frozen=True)
class _Mask:
    """The mask of a layer as transformers asks for it: causal, with a window or without."""

    window: int | None

    @classmethod
    def of(cls, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> _Mask:
        """Compares the function with a causal mask at some positions."""
        reach = local_size or 64
        for position in (2, reach - 1, reach, 3 * reach + reach // 2):
            keys = torch.arange(position + reach)
            zero, query = torch.zeros_like(keys), torch.full_like(keys, position)
            try:
                seen = mask_function(zero, zero, query, keys)
            except Exception as e:
                raise _Refused(f"it has a mask of its own ({type(e).__name__}: {e})") from None
            expected = keys <= query
            if local_size is not None:
                expected &= keys > query - local_size
            if not torch.equal(seen.expand_as(expected), expected):
                raise _Refused("it has a mask of its own: a token does not see all earlier ones, or a window of them")
        return cls(local_size)

    def __getitem__(self, index: Any) -> _Mask:
        """Some layers cut the mask to the length of the keys."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise _Refused("its layers compute with the mask of attention")


class _Probe:
    """A forward whose attention is recorded, and whose products are zero."""

    TOKENS = 3

    def __init__(self) -> None:
        self._calls: list[AttentionCall] = []
        self._keys: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def of(cls, model: Any) -> tuple[tuple[AttentionCall, ...], tuple[str, ...]]:
        """The attention calls of a model on the meta device, and the linear layers whose matrix other modules read.

        Tensors become zeros without memory: the code of many mixtures of experts reads values.
        """
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                        tensors[name] = nn.Parameter(zeros, False) if tensors is module._parameters else zeros
        model.tie_weights()
        linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
        zero_linears = {name: _ZeroLinear(linear) for name, linear in linears.items()}
        probe, body, tokens = cls(), _body(model), torch.arange(cls.TOKENS)[None]
        _set_modules(model, zero_linears)
        try:
            with _run(probe):
                body(input_ids=tokens, position_ids=tokens, use_cache=False)
        except _Refused:
            raise
        except Exception as e:
            raise _Refused(f"its code fails on flat rows ({type(e).__name__}: {e})") from None
        finally:
            _set_modules(model, linears)
        if not probe._calls:
            raise _Refused("its attention does not go through transformers' attention interface")
        return tuple(probe._calls), tuple(name for name, linear in zero_linears.items() if linear.is_read)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        if isinstance(mask, Tensor):
            raise _Refused("it makes masks of its own")
        if options.get("position_bias") is not None:
            raise _Refused("it adds a bias to the scores of attention")
        if not options.get("is_causal", True) or (mask is None and not getattr(module, "is_causal", True)):
            raise _Refused("its attention is bidirectional")
        if q.shape[0] != 1 or q.shape[2] != self.TOKENS or k.shape[2] != self.TOKENS:
            raise _Refused(f"its attention has queries {list(q.shape)} and keys {list(k.shape)} for 3 tokens")
        window = options.get("sliding_window") if mask is None else mask.window
        source = next((i for i, (key, value) in enumerate(self._keys) if _is_same(k, key) and _is_same(v, value)), None)
        cache = len(self._keys) if source is None else source
        if source is None:
            self._keys.append((k, v))
        self._calls.append(AttentionCall(cache, source is not None, k.shape[1], q.shape[3], v.shape[3], window))
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


def _set_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)


class _ZeroLinear(nn.Module):
    """In place of a linear layer: zeros of its shape, without the time of a product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._matrix = [linear.weight]
        #: Whether another module has read the matrix.
        self.is_read = False

    @property
    def weight(self) -> Tensor:
        self.is_read = True
        return self._matrix[0]

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.out_features)


# Arrays of kernels and tensors of torch.


class _TorchArrays:
    """For backends whose arrays are tensors."""

    def array(self, x: Tensor) -> Array:
        return x

    def tensor(self, x: Array) -> Tensor:
        return cast(Tensor, x)


class _CpuArrays(_TorchArrays):
    """Arrays of the CPU kernels and tensors over the same memory."""

    def __init__(self) -> None:
        self._new = import_module("octavo.kernels.cpu.array").CpuArray
        self._dtypes = {torch_dtype(dtype): dtype for dtype in DType}

    def array(self, x: Tensor) -> Array:
        return self._new(x, x.data_ptr(), tuple(x.shape), self._dtypes[x.dtype], x.stride())

    def tensor(self, x: Array) -> Tensor:
        values = x.numpy()
        if x.dtype is DType.BFLOAT16:  # which numpy's own types lack
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)


# The model with packed weights.


class _PackedLinear(nn.Module):
    """A linear layer over a packed weight."""

    def __init__(
        self, arrays: _TorchArrays, packed: PackedWeight, outputs: int, out_dtype: DType | None = None
    ) -> None:
        super().__init__()
        self.out_features, self._arrays, self._packed, self._out_dtype = outputs, arrays, packed, out_dtype

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if not len(rows):
            return x.new_zeros(*x.shape[:-1], self.out_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = self._arrays.tensor(self._packed(self._arrays.array(rows), self._out_dtype))
        return out.view(*x.shape[:-1], self.out_features)


class _PackedEmbedding(nn.Module):
    """The table of a tied head, whose packed weight gives its rows."""

    def __init__(self, arrays: _TorchArrays, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self._arrays, self._packed, self._dtype = arrays, packed, dtype

    def forward(self, ids: Tensor) -> Tensor:
        flat = self._arrays.array(ids.reshape(-1))
        rows = self._arrays.tensor(self._packed.rows(flat, 0, scale=1.0, dtype=_name_of(self._dtype)))
        return rows.to(self._dtype).view(*ids.shape, -1)


class _PackedExperts:
    """The experts of a layer: the rows of an expert in one product, summed in ascending order of the experts."""

    def __init__(self, module: Any, pack: Callable[[Tensor, Tensor | None], _PackedLinear]) -> None:
        self._module = module
        self._up = self._pack_all("gate_up_proj" if module.has_gate else "up_proj", pack)
        self._down = self._pack_all("down_proj", pack)

    def _pack_all(self, name: str, pack: Callable[[Tensor, Tensor | None], _PackedLinear]) -> list[_PackedLinear]:
        module = self._module
        weights, biases = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
        packed = [
            pack(weight.T if module.is_transposed else weight, None if biases is None else biases[expert])
            for expert, weight in enumerate(weights)
        ]
        for held in (name, f"{name}_bias")[: 1 + module.has_bias]:
            delattr(module, held)
        return packed

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        module, out = self._module, torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in index.unique().tolist():
            if expert >= len(self._up):  # a slot without an expert
                continue
            tokens, slots = (index == expert).nonzero(as_tuple=True)
            inner = self._up[expert](x[tokens])
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            result = self._down[expert](inner)
            if module.has_post_expert_norm:
                result = module.post_expert_norm(result)
            out.index_add_(0, tokens, (result * weights[tokens, slots, None]).float())
        return out.to(x.dtype)


class _GatedExperts:
    """Experts down(silu(gate(x)) * up(x)) without biases, by the kernels' own products of experts."""

    def __init__(self, arrays: _TorchArrays, kernels: Kernels, module: Any) -> None:
        self._arrays, dtype = arrays, _name_of(module.down_proj.dtype)
        gate_up = [
            kernels.pack([from_torch(part) for part in both.chunk(2)], dtype=dtype, gated=True)
            for both in module.gate_up_proj
        ]
        down = [kernels.pack([from_torch(weight)], dtype=dtype) for weight in module.down_proj]
        del module.gate_up_proj, module.down_proj
        self._experts, self._count = kernels.pack_experts(gate_up, down), len(down)

    @staticmethod
    def fits(module: Any) -> bool:
        return bool(
            module.has_gate
            and module.is_concatenated
            and not (module.has_bias or module.is_transposed or module.has_post_expert_norm)
            and type(module)._apply_gate is _default_apply_gate
            and type(module.act_fn) in (nn.SiLU, SiLUActivation)
        )

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if int(index.max()) >= self._count:
            raise RuntimeError(f"a token has the expert {int(index.max())} of {self._count}")
        array = self._arrays.array
        out = self._experts(array(x.contiguous()), array(index.int().contiguous()), array(weights.float().contiguous()))
        return self._arrays.tensor(out).to(x.dtype)


class _SteadyRows(TorchFunctionMode):
    """Computes each row alike whatever the number of rows, where torch on one thread of a CPU does not.

    Torch's products sum in an order that depends on the number of rows: they are computed row by row. Its elementwise
    functions have other code for the last numbers of a tensor and for gaps between rows, which may round otherwise:
    narrow rows are padded, and gaps closed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.dim() > 1:
            if func in _ELEMENTWISE:
                if not (missing := -x.shape[-1] % _VECTOR):
                    return func(x.contiguous(), *args[1:], **kwargs)
                return func(F.pad(x, (0, missing)), *args[1:], **kwargs)[..., : x.shape[-1]].contiguous()
            if func in _PRODUCTS and len(args) > 1 and args[1].dim() == 2 and x.numel() > x.shape[-1]:
                rows = x.reshape(-1, 1, x.shape[-1])
                return torch.cat([func(row, *args[1:], **kwargs) for row in rows]).view(*x.shape[:-1], -1)
        return func(*args, **kwargs)


#: Elementwise functions that are not exact.
_ROUNDED = (
    *("cos", "elu", "erf", "exp", "expm1", "gelu", "log", "log1p", "logsigmoid", "mish", "pow", "selu", "sigmoid"),
    *("silu", "sin", "softplus", "tanh"),
)
_PRODUCTS = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
_ELEMENTWISE = {getattr(module, name) for name in _ROUNDED for module in (torch, Tensor, F) if hasattr(module, name)}


class _Body(nn.Module):
    """In place of the model's body, so that the model computes the logits of given hidden states."""

    hidden: Tensor
    #: Of the output of the body's own forward.
    kind: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind(last_hidden_state=self.hidden)


def _name_of(dtype: torch.dtype) -> DType:
    return DType(str(dtype).removeprefix("torch."))


class TransformersForCausalLM(Network):
    """A language model of transformers on flat rows: a batch of one sequence, with the tokens of all requests."""

    is_recordable = False

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """Without values of options; see ``read_transformers_config``."""
        return read_transformers_config(reader.file.parent, {}, reader.generation, trust_remote_code=False)

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        assert isinstance(config, TransformersConfig)
        self._context, self._calls, self._source = context, config.calls, config
        self.kv_specs = [
            KVSpec(
                "full" if call.window is None else "sliding",
                call.kv_heads,
                call.cached_dim,
                context.kv_dtype_name,
                call.window,
            )
            for call in config.calls
            if not call.shares
        ]
        self.holds = [weight._replace(dtype=context.dtype) for weight in config.held]
        self._arrays = _TorchArrays()
        #: The model with ``_head`` as its body, and its own body.
        self._model: Any = None
        self._body: Any = None
        self._head = _Body()

    # Loading.

    def load_itself(self, seed: int | None) -> bool:
        source, context = self._source, self._context
        if context.kernels.name == "cpu":
            self._arrays = _CpuArrays()
        folder, dtype = Path(source.folder), torch_dtype(context.dtype)
        hf_config = _load_hf_config(folder, source.overrides, source.trust_remote_code)
        if seed is None:
            model = _load(folder, hf_config, dtype, source.trust_remote_code)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = _make_model(hf_config, source.trust_remote_code, dtype=dtype)
        self._pack(model)
        model.set_attn_implementation(_PAGED)
        model.to(getattr(context.kernels, "device", "cpu"))
        self._model, self._body = model, _body(model)
        setattr(model, _body_name(model), self._head)
        self._try_out()
        return True

    def _pack(self, model: Any) -> None:
        """Replaces linear layers and experts by packed weights."""
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        is_tied = head.weight is embedding.weight

        def pack(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
            values = None if bias is None else from_torch(bias)
            return self._context.kernels.pack([from_torch(weight)], values, dtype=_name_of(weight.dtype))

        #: By the id of the linear layer, which may be in several places; the list keeps all of them alive.
        shared: dict[int, _PackedLinear] = {}
        for path, module in [*model.named_modules()]:
            if hasattr(module, "has_post_expert_norm"):
                cast(Any, module).packed_experts = (
                    _GatedExperts(self._arrays, self._context.kernels, module)
                    if self._context.kernels.name == "cpu" and _GatedExperts.fits(module)
                    else _PackedExperts(
                        module, lambda weight, bias: _PackedLinear(self._arrays, pack(weight, bias), len(weight))
                    )
                )
            for name, child in [*module.named_children()]:
                is_linear = type(child) is nn.Linear or type(child) is Conv1D
                if id(child) in shared:
                    setattr(module, name, shared[id(child)])
                elif is_linear and f"{path}.{name}".removeprefix(".") not in self._source.read_directly:
                    weight = child.weight.T if isinstance(child, Conv1D) else child.weight
                    packed = pack(weight, child.bias)
                    # The best two of logits in bfloat16 often tie.
                    out_dtype = DType.FLOAT32 if child is head else None
                    shared[id(child)] = _PackedLinear(self._arrays, packed, len(weight), out_dtype)
                    setattr(module, name, shared[id(child)])
                    if child is head and is_tied and packed.has_rows and type(embedding) is nn.Embedding:
                        model.set_input_embeddings(_PackedEmbedding(self._arrays, packed, weight.dtype))
                    child._parameters.clear()  # frees the matrix before the next one is packed

    # Steps.

    def embed(self, token_ids: Array) -> Array:
        """The token ids themselves: the model embeds them."""
        return token_ids

    def forward_layers(
        self, residual: Array, batch: ForwardBatch, kv_caches: list[LayerCache], reader: ResidualReader | None = None
    ) -> Array:
        assert reader is None, "the residual stream of a model of transformers cannot be read"
        tensor = self._arrays.tensor
        forward = _PagedForward(self._context.kernels, self._arrays, self._calls, batch, kv_caches)
        with torch.inference_mode(), self._torch_functions(), _run(forward):
            hidden = self._hidden_states(tensor(batch.token_ids), tensor(batch.positions))
        return self._arrays.array(hidden)

    def _hidden_states(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        output = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        self._head.kind, hidden = type(output), output.last_hidden_state
        return hidden[0].contiguous()

    def logits(self, hidden: Array) -> Array:
        rows = self._arrays.tensor(hidden)
        self._head.hidden = rows[None]
        ids = torch.zeros(1, len(rows), dtype=torch.int64, device=rows.device)
        with torch.inference_mode(), self._torch_functions():
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return self._arrays.array(logits[0].float().contiguous())

    @contextmanager
    def _torch_functions(self) -> Iterator[None]:
        """Runs torch's functions on one thread beside the CPU kernels, whose own threads compute the products.

        Several threads would divide a tensor at places that depend on its size, and round the numbers there otherwise.
        """
        if self._context.kernels.name != "cpu":
            yield
            return
        threads = torch.get_num_threads()
        if threads > 1:
            torch.set_num_threads(1)
        try:
            with _SteadyRows():
                yield
        finally:
            if threads > 1:
                torch.set_num_threads(threads)

    # The trial at start.

    def _try_out(self) -> None:
        """Compares a few tokens with transformers' own attention, and their bits in company and alone.

        Raises:
            UnsupportedModelError: the logits are others, as the model's code mixes rows or ignores positions.
        """
        kernels, size = self._context.kernels, 16
        draw = np.random.default_rng(0).integers
        first, second = (draw(0, self.config.vocab_size, count) for count in (11, 7))
        caches = kernels.make_cache(groups := group_layers(self.kv_specs), [3] * len(groups), size)

        def step(parts: Sequence[tuple[np.ndarray, int, int]]) -> Tensor:
            """Hidden states of tokens, each with the position of the first one and a block."""
            ids, starts = np.concatenate([ids for ids, _, _ in parts]), [start for _, start, _ in parts]
            counts = [len(ids) for ids, _, _ in parts]
            ends = [start + count for start, count in zip(starts, counts, strict=True)]
            tables = np.array([[[block] for _, _, block in parts]] * len(groups), np.int32)
            batch = make_batch(counts, ends, tables, size, kernels, token_ids=ids)
            return self._arrays.tensor(self.forward_layers(batch.token_ids, batch, caches)).clone()

        with kernels.mode():
            begun = step([(second[:6], 0, 1), (first[:4], 0, 0)])[6:]
            crowded = torch.cat((begun, step([(second[6:], 6, 1), (first[4:], 4, 0)])[1:]))
            alone = step([(first, 0, 2)])
            ours = self._arrays.tensor(self.logits(self._arrays.array(crowded))).clone()
            expected = self._logits_of_transformers(torch.from_numpy(first).to(alone.device))
        error, spread = float((ours - expected).square().mean().sqrt()), float(expected.std())
        if not error <= (0.01 if self._context.dtype is DType.FLOAT32 else 0.3) * spread:
            raise UnsupportedModelError(
                f"{self.config.architecture} computes other logits on the rows of several requests than for one (by "
                f"{error:.3g}, of a spread of {spread:.3g}): its code mixes rows, or does not use their positions"
            )
        bits = "equal" if torch.equal(crowded, alone) else "not equal, and are not promised"
        logger.info(
            "%s runs through transformers %s, slower than a network of Octavo's own: attention, linear layers and "
            "experts by the %s kernels, the rest by torch. A trial gave transformers' logits within %.1g; bits in "
            "company and alone were %s",
            self.config.architecture,
            transformers.__version__,
            kernels.name,
            float((ours - expected).abs().max()),
            bits,
        )

    def _logits_of_transformers(self, token_ids: Tensor) -> Tensor:
        """By its own attention, [T, vocab]."""
        name, positions = _body_name(self._model), torch.arange(len(token_ids), device=token_ids.device)
        self._body.set_attn_implementation("eager")
        setattr(self._model, name, self._body)
        try:
            with torch.inference_mode(), self._torch_functions():
                output = self._model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        except Exception as e:
            raise UnsupportedModelError(
                f"{self.config.architecture} fails in transformers' own attention: {type(e).__name__}: {e}"
            ) from None
        finally:
            setattr(self._model, name, self._head)
            self._body.set_attn_implementation(_PAGED)
        logits: Tensor = output.logits[0].float()
        return logits


class _PagedForward:
    """A forward of a step, over the paged KV cache."""

    def __init__(
        self,
        kernels: Kernels,
        arrays: _TorchArrays,
        calls: Sequence[AttentionCall],
        batch: ForwardBatch,
        caches: list[LayerCache],
    ) -> None:
        self._kernels, self._arrays, self._batch, self._caches = kernels, arrays, batch, caches
        self._calls = iter(calls)

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """``s_aux``: attention sinks [H]."""
        kernels, batch, call = self._kernels, self._batch, next(self._calls)
        array, cache, width = self._arrays.array, self._caches[call.cache], call.cached_dim
        if not call.shares:
            keys, values = _heads(k, width), _heads(v.to(k.dtype), width)
            kernels.reshape_and_cache(array(keys), array(values), cache, batch.slot_mapping[cache.group])
        scale = q.shape[3] ** -0.5 if scaling is None else float(scaling)
        sinks = None if s_aux is None else array(s_aux.float().contiguous())
        spec = AttentionSpec(scale, call.window, softcap, sinks=sinks)
        out = self._arrays.tensor(kernels.paged_attention(array(_heads(q, width)), cache, batch, spec))
        return out[None, :, :, : call.value_dim]


def _heads(x: Tensor, width: int) -> Tensor:
    """[1, H, T, D] to [T, H, width], contiguous, with zeros behind the D dimensions."""
    x = x[0].transpose(0, 1)
    return F.pad(x, (0, width - x.shape[2])) if x.shape[2] < width else x.contiguous()


def _load(folder: Path, hf_config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model with the weights of the folder's safetensors; raises WeightError."""
    progress = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=hf_config,
            dtype=dtype,
            attn_implementation=_PAGED,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, RuntimeError, ValueError) as e:
        raise WeightError(f"{folder}: transformers cannot load the weights: {e}") from None
    finally:
        if progress:
            transformers.utils.logging.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):
        raise WeightError(f"{folder}: the checkpoint lacks {_list(missing)}, which {type(model).__name__} expects")
    if mismatched := sorted(str(entry) for entry in info["mismatched_keys"]):
        raise WeightError(f"{folder}: tensors do not fit {type(model).__name__}: {_list(mismatched)}")
    if unexpected := sorted(info["unexpected_keys"]):
        logger.warning("%s: %s does not use the tensors %s", folder, type(model).__name__, _list(unexpected))
    return _prepared(model)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
