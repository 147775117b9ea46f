"""Arrays of torch, and of numpy with ml_dtypes, over the same memory."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from octavo.core.dtypes import DType

_DTYPES = {name: getattr(torch, "float8_e4m3fn" if name is DType.FP8 else name.value) for name in DType}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
#: Types that numpy itself lacks, and one of its types of the same size.
_FOREIGN = {DType.BFLOAT16: (np.int16, torch.int16), DType.FP8: (np.uint8, torch.uint8)}


def torch_dtype(dtype: DType | str) -> torch.dtype:
    """Torch's type of these numbers."""
    return _DTYPES[DType(dtype)]


def to_torch(values: np.ndarray) -> Tensor:
    """A tensor over the array's memory, which must not be written if the array's must not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        foreign = {"bfloat16": DType.BFLOAT16, "float8_e4m3fn": DType.FP8}.get(values.dtype.name)
        if foreign is None:
            return torch.from_numpy(values)
        return torch.from_numpy(values.view(_FOREIGN[foreign][0])).view(_DTYPES[foreign])


def from_torch(x: Tensor) -> np.ndarray:
    """The values on the host: over the tensor's memory if it is there."""
    x, name = x.detach().cpu(), _NAMES.get(x.dtype)
    if name in _FOREIGN:
        return x.view(_FOREIGN[name][1]).numpy().view(name.numpy)
    values: np.ndarray = x.numpy()
    return values


def num_gpus() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_no_gpu() -> str:
    """Why it sees none."""
    why = "was built without CUDA" if torch.version.cuda is None else "sees no GPU; does nvidia-smi?"
    return f"torch {torch.__version__} {why}"


def gpu_name() -> str:
    """Of the process's current GPU."""
    return str(torch.cuda.get_device_name())
