"""FlashAttention 4 over packed rows, as operators that ``torch.compile`` does not look into.

The package ``flash-attn-4`` (extra ``flash-attention``) writes its kernels in Python and compiles
them on first use, some seconds for each head size and kind of mask. Traced by ``torch.compile``, its
host code would be compiled again for every shape, so both passes are operators of their own.

On an H200 they take half the time of torch's kernel, FlashAttention 2
(``benchmarks/attention.py``). With ``torch.use_deterministic_algorithms`` the backward pass sums in
a fixed order, which costs 7 to 17%.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

SIZES = (64, 96, 128)
"""Head sizes for which the kernels were compared with float64. Others are left to torch."""

_in_use = False


@cache
def is_installed() -> bool:
    """Return whether the package is there. An older ``flash-attn`` has the same name, and often
    cannot be imported with another torch than its own.
    """
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def use_if_possible(wanted: bool, device: torch.device) -> str:
    """Choose the kernel of packed attention for this process, and return a name for the log.

    Args:
        wanted: Whether the user leaves the choice to slime.
        device: The kernels need Hopper (compute capability 9) or newer.
    """
    global _in_use
    suitable = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    _in_use = wanted and suitable and is_installed()
    if _in_use:
        # One for each kernel that is compiled, about an argument that is always empty here.
        warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
    if device.type == "cpu":
        return "slime's for the CPU"
    return "FlashAttention 4" if _in_use else "torch's varlen attention (FlashAttention 2)"


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernels were chosen and support these rows ``[T, H, d]``."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return _in_use and half and q.is_cuda and q.shape[-1] in SIZES and v.shape[-1] == k.shape[-1]


def flash_attention_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    window: int = -1,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally over segments; the queries of a segment are the last of its tokens.

    Args:
        q: ``[T, H, d]`` in bfloat16 or float16; k, v: ``[K, H_kv, d]``.
        starts_q, starts_k: int32 ``[segments + 1]``, the first row of each segment, and the count.
        longest_q, longest_k: Rows of the longest segment.
        window: Maximum number of keys before a query that it attends to; -1: all.
        sinks: ``[H]``.

    Returns:
        ``[T, H, d]``.
    """
    rows = q.contiguous(), k.contiguous(), v.contiguous()
    sizes = starts_q, starts_k, longest_q, longest_k, scale, window
    deterministic = torch.are_deterministic_algorithms_enabled()
    out, _ = _forward(*rows, *sizes, sinks, deterministic)
    return out


def _mask(window: int) -> dict[str, Any]:
    if window < 0:
        return dict(causal=True)
    return dict(causal=False, window_size_left=window, window_size_right=0)


@torch.library.custom_op("slime::flash_attention_4", mutates_args=(), device_types="cuda")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        softmax_scale=scale,
        learnable_sink=sinks,
        return_lse=True,
        **_mask(window),
    )
    return out, lse


@_forward.register_fake
def _(q: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("slime::flash_attention_4_backward", mutates_args=(), device_types="cuda")
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    deterministic: bool,
) -> list[Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    grads = _flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad,
        lse,
        scale,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        deterministic=deterministic,
        learnable_sink=sinks,
        **_mask(window),
    )
    return list(grads)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> list[Tensor]:
    sinks = rest[6]
    return [torch.empty_like(x) for x in (q, k, v, sinks) if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts_q, starts_k, longest_q, longest_k, scale, window, sinks, deterministic = inputs
    ctx.save_for_backward(q, k, v, *output, starts_q, starts_k, sinks)
    ctx.settings = longest_q, longest_k, scale, window, deterministic


def _grads(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, starts_q, starts_k, sinks = ctx.saved_tensors
    longest_q, longest_k, scale, window, deterministic = ctx.settings
    sizes = starts_q, starts_k, longest_q, longest_k, scale, window
    rows = grad.contiguous(), q, k, v, out, lse
    dq, dk, dv, *dsinks = _backward(*rows, *sizes, sinks, deterministic)
    return (dq, dk, dv, *(None,) * 6, dsinks[0] if dsinks else None, None)


_forward.register_autograd(_grads, setup_context=_save)
