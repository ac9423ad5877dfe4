"""A piece of work by kernel, as torch's profiler sees it: a table of milliseconds, by kind and by
name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

KINDS = (  # the first that matches
    ("FSDP", r"chunk_cat|split_with_sizes_copy|all_gather|reduce_scatter"),
    ("grouped products", r"[Gg]roup(ed)?.*([Gg]emm|GEMM)|GroupProblemShape"),
    ("attention", r"flash|fmha|cudnn.*(sdpa|attn)"),
    ("matrix products", r"nvjet|cutlass|gemm|cublas"),
    ("compiled", r"^triton_"),
    ("optimizer and norms", r"multi_tensor|lpnorm|FusedAdam|fused_adam"),
    ("gather, scatter, sort", r"index|gather|scatter|sort|topk|masked|scan|radix|[Ss]elect"),
    ("copies", r"Memcpy|copy|Memset|FillFunctor"),
    ("other elementwise", r"elementwise|reduce_kernel|softmax"),
)
WIDTH = 110


def kernel_table(work: Callable[[], Any], rows: int = 30) -> str:
    """Run ``work`` once under the profiler, and return milliseconds and launches of its kernels.

    ``busy`` is the time in which at least one kernel ran, ``span`` the time from the first kernel
    to the last.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    spans = []
    waits = 0
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if not getattr(event, "is_user_annotation", False):
                spans.append((event.time_range.start, event.time_range.end))
                kernels[event.name][0] += event.time_range.end - event.time_range.start
                kernels[event.name][1] += 1
        elif event.name in (
            "cudaStreamSynchronize",
            "cudaDeviceSynchronize",
            "cudaEventSynchronize",
        ):
            waits += 1
    if not spans:
        return "no kernels ran on a GPU\n"
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, (microseconds, count) in kernels.items():
        kind = next((kind for kind, pattern in KINDS if re.search(pattern, name)), "rest")
        kinds[kind][0] += microseconds
        kinds[kind][1] += count
    lines = [
        f"span {_span(spans) / 1e3:.1f} ms, busy {_busy(spans) / 1e3:.1f} ms, the host waited "
        f"{waits} times"
    ]
    for title, found in (("kind", kinds), ("kernel", kernels)):
        lines.append(f"{'ms':>9} {'launches':>9}  {title}")
        ordered = sorted(found.items(), key=lambda item: -item[1][0])[:rows]
        lines += [
            f"{time / 1e3:9.2f} {count:9.0f}  {name[:WIDTH]}" for name, (time, count) in ordered
        ]
    return "\n".join(lines) + "\n"


def _span(spans: list[tuple[float, float]]) -> float:
    return max(end for _, end in spans) - min(start for start, _ in spans)


def _busy(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total
