"""Small things that scripts import from vLLM."""

from __future__ import annotations

import enum
import gc
import logging
import random
import socket
import uuid
from pathlib import Path

from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.loader.resolve import resolve_model

#: The version of vLLM whose names these are, for scripts that compare it.
VERSION = "0.33.0+octavo"


def init_logger(name: str) -> logging.Logger:
    """The logger of this name."""
    return logging.getLogger(name)


def random_uuid() -> str:
    """A random id of 32 hexadecimal digits."""
    return uuid.uuid4().hex


def get_open_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def get_ip() -> str:
    """An address of this machine."""
    return socket.gethostbyname(socket.gethostname())


def get_tokenizer(tokenizer_name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model by name, folder or hub id; no code of it is run.

    Raises:
        OctavoError: it is unknown, or its tokenizer cannot be read.
    """
    return load_tokenizer(Path(resolve_model(tokenizer_name, revision=revision)))


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Frees the memory of engines that are no longer referred to: an ``LLM`` ends its workers when it is dropped."""
    gc.collect()
    if shutdown_ray:
        import ray

        ray.shutdown()


def destroy_model_parallel() -> None:
    """Nothing: workers end with their engine."""


def destroy_distributed_environment() -> None:
    """Nothing: workers end with their engine."""


class UsageContext(enum.Enum):
    """What an engine is made for; without effect, as nothing is reported."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class Platform:
    """The device that engines of this machine take by default."""

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        from octavo.kernels import resolve_device

        return resolve_device("auto")

    @property
    def device_name(self) -> str:
        """As ``device_type``."""
        return self.device_type

    def is_cpu(self) -> bool:
        """Whether it is a CPU."""
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        """Whether it is a GPU of NVIDIA."""
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        """As ``is_cuda``."""
        return self.is_cuda()

    def is_rocm(self) -> bool:
        """Not supported."""
        return False

    def is_tpu(self) -> bool:
        """Not supported."""
        return False

    def is_xpu(self) -> bool:
        """Not supported."""
        return False

    def seed_everything(self, seed: int | None = None) -> None:
        """Seeds ``random``, which Octavo itself does not use."""
        if seed is not None:
            random.seed(seed)


current_platform = Platform()
