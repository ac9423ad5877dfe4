"""Decode kernels of the engine beside each other: microseconds of one layer, and the rate at which
the KV cache is read.

    python benchmarks/attention_decode.py                          # shape of Qwen3-4B, 8 to 512 requests
    python benchmarks/attention_decode.py --heads 16 --context 4096

Candidates, each if it is installed: ``triton`` (SGLang's own kernel, in the splits that SGLang
chooses), ``flashinfer`` (compiled at its first use), ``fa4`` (``flash-attn-4``, pages of 128) and
``torch`` (``torch.nn.attention.varlen``, FlashAttention 2, over a cache without pages). One query per
request, grouped-query attention, bf16, pages of one token in random order, as SGLang has them by
default. As many layers as hold 512 MB are recorded in a CUDA graph, so that the L2 cache holds none of
the next one. Errors are those of the output against attention in float64. The last line is JSON.
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
from typing import Any

import torch
from torch import Tensor

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT)]
BYTES = 512 * 2**20
PAGE = 128  # of fa4


@dataclass
class Cache:
    """The requests and the KV cache of one layer: q ``[B, H, d]``, k and v ``[B * context, H_kv, d]``.

    Attributes:
        slots: The places of each request's tokens in k and v, in their order.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor
    context: int

    @property
    def starts(self) -> Tensor:
        count = self.q.shape[0] + 1
        return torch.arange(count, device="cuda", dtype=torch.int32) * self.context


Attention = Callable[[], Tensor]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128, help="of a head")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each request")
    parser.add_argument("--requests", type=int, nargs="+", default=[2**n for n in range(3, 10)])
    parser.add_argument("--repeats", type=int, default=10)
    return parser.parse_args()


def make_cache(options: argparse.Namespace, requests: int) -> Cache:
    tokens = requests * options.context

    def rows(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, options.size, device="cuda", dtype=torch.bfloat16)

    # whole pages of fa4 stay together, so that all candidates read the same cache
    pages = torch.randperm(tokens // PAGE, device="cuda")[:, None] * PAGE
    slots = (pages + torch.arange(PAGE, device="cuda")).flatten().to(torch.int32)
    return Cache(
        rows(requests, options.heads),
        rows(tokens, options.kv_heads),
        rows(tokens, options.kv_heads),
        slots,
        options.context,
    )


# --- the candidates ----------------------------------------------------------------------------


def with_triton(cache: Cache) -> Attention:
    from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd
    from sglang.srt.layers.attention.triton_ops.metadata import get_num_kv_splits_triton

    requests, heads, size = cache.q.shape
    most = 8  # SGLang's --triton-attention-num-kv-splits
    out = torch.empty_like(cache.q)
    partial = torch.empty(requests, heads, most, size, device="cuda", dtype=torch.float32)
    sums = torch.empty(requests, heads, most, device="cuda", dtype=torch.float32)
    splits = torch.empty(requests, device="cuda", dtype=torch.int32)
    lengths = torch.full((requests,), cache.context, device="cuda", dtype=torch.int32)
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    get_num_kv_splits_triton[(1,)](
        splits,
        lengths,
        requests,
        1,
        heads,
        cache.k.shape[1],
        most,
        cores,
        MAX_NUM_SEQ=max(256, 1 << (requests - 1).bit_length()),
    )
    starts = cache.starts
    slots = cache.slots.long()

    def run() -> Tensor:
        scale = size**-0.5
        decode_attention_fwd(
            cache.q, cache.k, cache.v, out, starts, slots, partial, sums, splits, most, scale, 1.0, 1.0
        )  # fmt: skip
        return out

    return run


def with_flashinfer(cache: Cache) -> Attention:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    requests, heads, size = cache.q.shape
    workspace = torch.empty(256 * 2**20, device="cuda", dtype=torch.uint8)
    # as SGLang calls it for this many queries on a head of keys
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    last = torch.ones(requests, device="cuda", dtype=torch.int32)
    kv_heads = cache.k.shape[1]
    wrapper.plan(
        cache.starts, cache.slots, last, heads, kv_heads, size, 1,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    paged = cache.k.unsqueeze(1), cache.v.unsqueeze(1)
    return lambda: wrapper.run(cache.q, paged)


def with_fa4(cache: Cache) -> Attention:
    from flash_attn.cute.interface import flash_attn_varlen_func

    requests = cache.q.shape[0]
    ones = torch.arange(requests + 1, device="cuda", dtype=torch.int32)
    lengths = torch.full((requests,), cache.context, device="cuda", dtype=torch.int32)
    table = (cache.slots[::PAGE] // PAGE).view(requests, -1).contiguous()
    k, v = (x.view(-1, PAGE, *x.shape[1:]) for x in (cache.k, cache.v))

    def run() -> Tensor:
        out = flash_attn_varlen_func(
            cache.q, k, v, cu_seqlens_q=ones, max_seqlen_q=1, max_seqlen_k=cache.context,
            seqused_k=lengths, page_table=table, causal=True,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return run


def with_torch(cache: Cache) -> Attention:
    from torch.nn.attention.varlen import varlen_attn

    ones = torch.arange(cache.q.shape[0] + 1, device="cuda", dtype=torch.int32)
    starts = cache.starts
    k, v = cache.k[cache.slots.long()], cache.v[cache.slots.long()]
    named = "enable_gqa" in inspect.signature(varlen_attn).parameters
    extra: dict[str, Any] = {"enable_gqa": True} if named else {}

    def run() -> Tensor:
        out = varlen_attn(cache.q, k, v, ones, starts, 1, cache.context, **extra)
        assert isinstance(out, Tensor)
        return out

    return run


CANDIDATES = {
    "triton": with_triton, "flashinfer": with_flashinfer, "fa4": with_fa4, "torch": with_torch,
}  # fmt: skip


# --- what is measured --------------------------------------------------------------------------


def error(cache: Cache, out: Tensor) -> float:
    """The norm of the difference from attention in float64 over the norm, of some requests."""
    few = min(cache.q.shape[0], 8)
    slots = cache.slots[: few * cache.context].long()
    groups = cache.q.shape[1] // cache.k.shape[1]
    k, v = (
        x[slots].double().view(few, cache.context, -1, x.shape[-1]).repeat_interleave(groups, 2)
        for x in (cache.k, cache.v)
    )
    scores = torch.einsum("bhd,bthd->bht", cache.q[:few].double(), k) * cache.q.shape[-1] ** -0.5
    exact = torch.einsum("bht,bthd->bhd", scores.softmax(-1), v)
    return float((out[:few].double() - exact).norm() / exact.norm())


def measure(
    candidate: Callable[[Cache], Attention], caches: list[Cache], repeats: int
) -> dict[str, Any]:
    layers = [candidate(cache) for cache in caches]
    wrong = error(caches[0], layers[0]())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in layers:
            layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for layer in layers:
            layer()
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(layers))
    milliseconds = statistics.median(times[3:])
    read = 2 * caches[0].k.nbytes
    return {
        "layer_us": round(1e3 * milliseconds, 1),
        "cache_tb_per_s": round(read / milliseconds / 1e9, 2),
        "error": wrong,
    }


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for requests in options.requests:
        first = make_cache(options, requests)
        more = max(BYTES // (2 * first.k.nbytes), 1)
        caches = [first, *(make_cache(options, requests) for _ in range(more))]
        for name, candidate in CANDIDATES.items():
            try:
                result = measure(candidate, caches, options.repeats)
            except Exception as problem:
                result = {"error": f"{type(problem).__name__}: {str(problem)[:300]}"}
            rows.append({"requests": requests, "kernel": name, **result})
            print(json.dumps(rows[-1]), flush=True)
        del caches, first
    shape = {name: getattr(options, name) for name in ("heads", "kv_heads", "size", "context")}
    device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({"benchmark": "attention_decode", **device, **shape, "rows": rows}))


if __name__ == "__main__":
    main()
