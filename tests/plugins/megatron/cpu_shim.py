"""Let megatron-core run on a CPU without CUDA: what it asks of ``torch.cuda`` is answered for the
CPU.

For tests only. ``install()`` before megatron is imported; it does nothing where CUDA is present.

1. queries, streams, events and generators of torch.cuda become those of the CPU, or nothing;
2. ``device="cuda"`` and ``.cuda()`` mean the CPU, pinned memory is plain memory;
3. ``Tensor.type()`` of a floating-point tensor says ``torch.cuda...``, which Megatron's optimizers
   compare with;
4. two functions of megatron-core that look at ``is_cuda``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = (
    "zeros ones empty full tensor arange rand randn randint eye linspace "
    "zeros_like ones_like empty_like full_like as_tensor"
)


class _Anything:
    """A stream or an event of a device that has none: everything is done at once."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def nothing(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Anything()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def __enter__(self) -> _Anything:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, str | torch.device) else False


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return wrapper


@functools.cache
def install() -> None:
    """Patch torch, and megatron-core once it is imported by slime (:func:`install_megatron`)."""
    if torch.cuda.is_available():
        return
    from torch.utils._device import _device_constructors

    _device_constructors()  # remembers the factories as they are now, for torch.device("meta")
    _patch_cuda_module()
    for name in FACTORIES.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *a, **k: self
    torch.nn.Module.cuda = lambda self, *a, **k: self  # type: ignore[assignment]
    tensor.record_stream = lambda self, *a: None
    original_to, original_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original_to(self, *(CPU if _is_cuda(x) else x for x in args), **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            plain = (x.replace("torch.cuda.", "torch.") if isinstance(x, str) else x for x in args)
            return original_type(self, *plain, **kwargs)
        name = original_type(self)
        return name.replace("torch.", "torch.cuda.") if self.is_floating_point() else name

    tensor.to, tensor.type = to, type_


def _answer(value: Any = None) -> Callable[..., Any]:
    """A new function each time: torch.compile wants every function of torch under one name only."""
    return lambda *_, **__: value


def _patch_cuda_module() -> None:
    cuda: Any = torch.cuda
    stream = _Anything()
    cuda.current_device = _answer(CPU)
    cuda.device_count = _answer(0)
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, _answer())
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        setattr(cuda, name, _answer(0))
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, _answer(stream))
    for name in ("manual_seed", "manual_seed_all"):
        setattr(cuda, name, lambda seed: torch.default_generator.manual_seed(int(seed)) and None)
    cuda.Stream = cuda.Event = _Anything
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.initial_seed = lambda: torch.initial_seed()
    cuda.is_current_stream_capturing = _answer(False)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _answer(), _answer()
    cuda.nvtx.range = lambda *_, **__: contextlib.nullcontext()


@functools.cache
def install_megatron() -> None:
    """What is inside megatron-core; after :func:`slime.plugins.megatron.core.prepare`."""
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )

    def to_host(x: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return x.numpy() if as_numpy and torch.is_tensor(x) else x

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host


def prepare_on_cpu() -> None:
    """Everything, in the right order."""
    install()
    from slime.plugins.megatron.core import prepare

    prepare()
    install_megatron()
