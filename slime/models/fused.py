"""Functions of a few elementwise passes that are compiled to one kernel on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
COMPILED_VARIANTS = 64  # per compiled function, one for each combination of trailing sizes; torch's default limit is 8

_fused = True


def fuse(on: bool) -> None:
    """Set whether this process compiles functions with :func:`fused_on_cuda` (not with ``--no-compile-layers``)."""
    global _fused
    _fused = on


def fused_on_cuda(fn: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Compile ``fn`` for tensors on a GPU. The first size of each tensor is dynamic. The function is compiled again for
    other trailing sizes, because kernels in which all sizes are dynamic are several times slower."""

    @functools.cache
    def compiled() -> Callable[_Arguments, _Result]:
        # At the first call, not where ``fn`` is defined: torch imports the compiler here, which takes seconds.
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED_VARIANTS)
        return torch.compile(fn)

    @functools.wraps(fn)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        tensors = [x for x in args if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)]
        # A compiled layer that contains the function sets the dynamic sizes itself.
        if not (_fused and tensors[0].is_cuda) or torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        for x in tensors:
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch._dynamo.mark_static(x, list(range(1, x.dim())))
        return compiled()(*args, **kwargs)

    return call
