"""Attention kernels of the trainer beside each other: seconds and errors, forward and backward.

    python benchmarks/attention.py                         # shape of Qwen3-4B, samples of 1k to 64k
    python benchmarks/attention.py --heads 16 --tokens 16384 --deterministic

Candidates: ``torch`` (``torch.nn.attention.varlen``, FlashAttention 2) and ``fa4`` (the package
``flash-attn-4``), if it is installed. Packs of equal samples, causal, grouped-query attention, bf16.
TFLOP/s count half of the square of each sample, and 2.5 times the forward pass for the backward.

Errors are of a pack of unequal samples, a pack whose samples share prompts, a sliding window and
attention sinks, each compared with attention in float64: the norm of the difference over the norm,
of the output and of each gradient, and the largest of them over all samples. The last line is JSON.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT)]

Attention = Callable[["Case"], Tensor]


@dataclass
class Case:
    """One pack: q ``[T, H, d]``, k and v ``[T_k, H_kv, d]``, and the first row of each segment."""

    q: Tensor
    k: Tensor
    v: Tensor
    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int
    window: int = -1
    sinks: Tensor | None = None

    @property
    def inputs(self) -> list[Tensor]:
        return [self.q, self.k, self.v] + ([self.sinks] if self.sinks is not None else [])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128, help="of a head")
    parser.add_argument(
        "--tokens", type=int, default=32768, help="of a pack; more for longer samples"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(10, 17)])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--deterministic", action="store_true", help="backward pass of fa4")
    return parser.parse_args()


def make_case(
    options: argparse.Namespace,
    lengths_q: list[int],
    lengths_k: list[int],
    window: int = -1,
    sinks: bool = False,
) -> Case:
    """Random rows for segments of these lengths."""
    generator = torch.Generator("cuda").manual_seed(len(lengths_q))

    def rows(count: int, heads: int) -> Tensor:
        shape = (count, heads, options.size)
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        return x.requires_grad_()

    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)

    return Case(
        rows(sum(lengths_q), options.heads),
        rows(sum(lengths_k), options.kv_heads),
        rows(sum(lengths_k), options.kv_heads),
        starts(lengths_q),
        starts(lengths_k),
        max(lengths_q),
        max(lengths_k),
        window,
        torch.randn(options.heads, device="cuda", dtype=torch.bfloat16).requires_grad_()
        if sinks
        else None,
    )


# --- the candidates ----------------------------------------------------------------------------


def with_torch(case: Case) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    from slime.models.packed_attention import varlen_with_sinks

    scale = case.q.shape[-1] ** -0.5
    if case.sinks is not None:
        pack: Any = SimpleNamespace(
            cu_seqlens_q=case.starts_q,
            cu_seqlens_k=case.starts_k,
            max_q=case.longest_q,
            max_k=case.longest_k,
        )
        return varlen_with_sinks(case.q, case.k, case.v, case.sinks, pack, scale, case.window)
    named = "enable_gqa" in inspect.signature(varlen_attn).parameters
    extra: dict[str, Any] = {"enable_gqa": True} if named else {}
    out = varlen_attn(
        case.q,
        case.k,
        case.v,
        case.starts_q,
        case.starts_k,
        case.longest_q,
        case.longest_k,
        scale=scale,
        window_size=(case.window, 0),
        **extra,
    )
    assert isinstance(out, Tensor)
    return out


def with_fa4(case: Case, deterministic: bool = False) -> Tensor:
    from flash_attn.cute.interface import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        case.q,
        case.k,
        case.v,
        cu_seqlens_q=case.starts_q,
        cu_seqlens_k=case.starts_k,
        max_seqlen_q=case.longest_q,
        max_seqlen_k=case.longest_k,
        softmax_scale=case.q.shape[-1] ** -0.5,
        causal=case.window < 0,
        window_size=(None, None) if case.window < 0 else (case.window, 0),
        learnable_sink=case.sinks,
        deterministic=deterministic,
    )
    return out[0] if isinstance(out, tuple) else out


def in_float64(case: Case) -> Tensor:
    """Every segment alone, with a mask: the queries are the last tokens of their keys."""
    parts = []
    heads = case.q.shape[1]
    starts_q = case.starts_q.tolist()
    starts_k = case.starts_k.tolist()
    for i in range(len(starts_q) - 1):
        q = case.q[starts_q[i] : starts_q[i + 1]].double().transpose(0, 1)
        k, v = (
            x[starts_k[i] : starts_k[i + 1]]
            .double()
            .transpose(0, 1)
            .repeat_interleave(heads // x.shape[1], 0)
            for x in (case.k, case.v)
        )
        query = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device)[:, None]
        key = torch.arange(k.shape[1], device=q.device)[None, :]
        seen = key <= query
        if case.window >= 0:
            seen = seen & (key >= query - case.window)
        scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        if case.sinks is not None:
            sink = case.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        parts.append((shares @ v).transpose(0, 1))
    return torch.cat(parts)


# --- what is measured --------------------------------------------------------------------------


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for number in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def speed(attention: Attention, case: Case, length: int, repeats: int) -> dict[str, float]:
    """Milliseconds and TFLOP/s of both passes over a pack of samples of one length."""
    samples = case.q.shape[0] // length
    flops = 4 * case.q.shape[1] * case.q.shape[2] * samples * length**2 / 2
    with torch.no_grad():
        forward = milliseconds(lambda: attention(case), repeats)
    out = attention(case)
    grad = torch.randn_like(out)
    backward = milliseconds(
        lambda: torch.autograd.grad(out, case.inputs, grad, retain_graph=True), repeats
    )
    return {
        "forward_ms": round(forward, 3),
        "backward_ms": round(backward, 3),
        "forward_tflops": round(flops / forward / 1e9, 1),
        "backward_tflops": round(2.5 * flops / backward / 1e9, 1),
    }


def errors(attention: Attention, case: Case) -> dict[str, float]:
    """Relative errors of the output and the gradients against float64."""
    exact = in_float64(case)
    grad = torch.randn_like(exact)
    out = attention(case)
    wanted = [exact, *torch.autograd.grad(exact, case.inputs, grad)]
    found = [out, *torch.autograd.grad(out, case.inputs, grad.to(out.dtype))]
    names = ["out", "dq", "dk", "dv", "dsinks"]
    return {
        name: ((a.detach().double() - b).norm() / b.norm()).item()
        for name, a, b in zip(names, found, wanted, strict=False)
    }


def repeats_exactly(attention: Attention, case: Case) -> bool:
    """Whether the gradients of two backward passes are equal bit for bit."""
    passes = []
    for _ in range(2):
        out = attention(case)
        torch.manual_seed(0)
        passes.append(torch.autograd.grad(out, case.inputs, torch.randn_like(out)))
    return all(torch.equal(a, b) for a, b in zip(*passes, strict=True))


def main() -> None:
    options = parse_options()
    candidates: dict[str, Attention] = {"torch": with_torch}
    try:
        import flash_attn.cute.interface  # noqa: F401

        candidates["fa4"] = lambda case: with_fa4(case, options.deterministic)
    except ImportError as error:
        print(f"fa4: {error}")
    rows: list[dict[str, object]] = []

    def add(kind: str, name: str, work: Callable[[], dict[str, float] | bool]) -> None:
        try:
            result = work()
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}  # type: ignore[dict-item]
        rows.append({"case": kind, "kernel": name, "result": result})
        print(json.dumps(rows[-1]), flush=True)

    mixed = [700, 33, 1, 1200, 257, 64]
    shared = [300, 300, 50, 640]
    cases = {
        "unequal samples": make_case(options, mixed, mixed),
        "shared prompts": make_case(options, shared, [n + 200 for n in shared]),
        "window of 128": make_case(options, mixed, mixed, window=127),
        "sinks": make_case(options, mixed, mixed, sinks=True),
        "window and sinks": make_case(options, mixed, mixed, window=127, sinks=True),
    }
    for kind, case in cases.items():
        for name, attention in candidates.items():
            add(kind, name, lambda a=attention, c=case: errors(a, c))  # type: ignore[misc]
    for name, attention in candidates.items():
        add("repeats", name, lambda a=attention: repeats_exactly(a, cases["unequal samples"]))  # type: ignore[misc]
    for length in options.lengths:
        count = max(options.tokens // length, 1)
        case = make_case(options, [length] * count, [length] * count)
        for name, attention in candidates.items():
            add(
                f"{count} x {length}",
                name,
                lambda a=attention, c=case, n=length: speed(a, c, n, options.repeats),  # type: ignore[misc]
            )
        del case
    print(
        json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows})
    )


if __name__ == "__main__":
    main()
