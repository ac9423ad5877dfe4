"""HTTP calls and seconds of a disaggregated weight sync, by the number of engines.

    python benchmarks/sync_calls.py                         # Qwen3-30B-A3B's tensors; 8, 32 and 125 engines
    python benchmarks/sync_calls.py --layers 2 --engines 2,4 --repeats 1   # a trial of the script

Measures the control plane alone: the whole of ``sync_weights`` runs against HTTP servers that read
each request and answer at once, with tensors that have names, shapes and dtypes but no memory, and
with a process group that sends nothing. ``before`` is one sender with buckets of 512 MiB that
encodes each bucket's names and shapes once per engine; ``after`` is the present default: buckets of
1 GiB, one encoding for all engines, and as many senders as slime chooses for so many engines, each
in a process of its own. Both run in turn, ``--repeats`` times. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HIDDEN, EXPERT, EXPERTS, HEAD, HEADS, KV_HEADS, VOCABULARY = 2048, 768, 128, 128, 32, 4, 151936
"""Of Qwen3-30B-A3B."""
PROCESS_SECONDS = 500.0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default="8,32,125", help="numbers of engines, comma-separated")
    parser.add_argument("--layers", type=int, default=48, help="of the model")
    parser.add_argument("--repeats", type=int, default=3, help="syncs of each kind")
    parser.add_argument(
        "--ranks", type=int, default=64, help="training ranks, which bound the number of senders"
    )
    return parser.parse_args()


def named_weights(layers: int) -> Iterator[tuple[str, Any]]:
    import torch

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    yield "model.embed_tokens.weight", meta(VOCABULARY, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{prefix}.self_attn.{name}_proj.weight", meta(rows * HEAD, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", meta(HIDDEN, HEADS * HEAD)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{name}.weight", meta(HEAD)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", meta(HIDDEN)
        yield f"{prefix}.mlp.gate.weight", meta(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (
                ("gate", (EXPERT, HIDDEN)),
                ("up", (EXPERT, HIDDEN)),
                ("down", (HIDDEN, EXPERT)),
            ):
                yield f"{prefix}.mlp.experts.{expert}.{name}_proj.weight", meta(*shape)
    yield "model.norm.weight", meta(HIDDEN)
    yield "lm_head.weight", meta(VOCABULARY, HIDDEN)


# --- engines
# ---------------------------------------------------------------------------------------


def serve(pipe: Any) -> None:
    """Any number of engines: the first part of a path is the engine's number. Sends its port."""
    from aiohttp import web

    answers: dict[str, Any] = {
        "server_info": {"engine": "embedded", "version": "1", "dtype": "bfloat16", "tp_size": 1},
        "model_info": {"model_path": "none", "weight_version": "none"},
        "v1/loads": {"loads": [{}]},
    }

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(answers.get(request.match_info["path"], {"success": True}))

    async def run() -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{engine}/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        pipe.send(runner.addresses[0][1])
        await asyncio.to_thread(pipe.recv)
        await runner.cleanup()

    asyncio.run(run())


# --- one sender
# ------------------------------------------------------------------------------------


def send(urls: list[str], layers: int, before: bool, start: Any, results: Any) -> None:
    """One sync by one sender to its engines, in a process of its own."""
    from slime.config.args import Args
    from slime.engines.handle import EngineHandle
    from slime.weights.settings import WeightSyncSettings
    from slime.weights.sync import sync_weights
    from slime.weights.transports.distributed import DistributedTransport

    class NoBytes:
        name = "none"

        def broadcast(self, tensors: Any, flat: bool = False) -> None:
            pass

    class ControlPlane(DistributedTransport):
        async def _join(self, engines: Any) -> dict[str, Exception]:
            self._group, self._members = NoBytes(), {engine.url: engine for engine in engines}  # type: ignore[assignment]
            return {}

    calls = 0

    class Counts(EngineHandle):
        async def _call(self, *arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            return await super()._call(*arguments, **named)

    class EncodesEachTime(Counts):
        async def receive(self, broadcast: Any) -> None:
            fields = ("names", "dtypes", "shapes", "group_name", "weight_version")
            body = {name: getattr(broadcast, name) for name in fields} | {"flush_cache": False}
            await self._post("/update_weights_from_distributed", body, self.update_seconds)

    settings = WeightSyncSettings.from_args(
        Args(update_weight_buffer_size=512 * 2**20 if before else None, audit_weights=False)
    )
    settings = dataclasses.replace(
        settings,
        train_dtype="bfloat16",
        step_seconds=270.0,
        phase_seconds=300.0,
    )
    make = EncodesEachTime if before else Counts
    transport = ControlPlane("nccl", 300.0)
    weights = list(named_weights(layers))
    # imports, connections
    sync_weights(settings, weights[:1], [make(url) for url in urls], transport, "0.0", True)
    handles = [make(url) for url in urls]  # as a trainer makes them for each sync
    start.wait()
    calls, began, cpu = 0, time.perf_counter(), time.process_time()
    sync_weights(settings, weights, handles, transport, "0.1", True)
    results.put((time.perf_counter() - began, time.process_time() - cpu, calls))


def measure(options: argparse.Namespace, port: int, count: int, before: bool) -> dict[str, float]:
    """One sync; seconds are those of the slowest sender."""
    from slime.weights.transports import _divided

    urls = [f"http://127.0.0.1:{port}/{i}" for i in range(count)]
    ranks = _divided(1 if before else None, urls, {}, options.ranks)
    shares = [[url for url in urls if ranks[url] == rank] for rank in dict.fromkeys(ranks.values())]
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(len(shares)), context.Queue()
    processes = [
        context.Process(target=send, args=(share, options.layers, before, start, results))
        for share in shares
    ]
    for process in processes:
        process.start()
    try:
        times = [results.get(timeout=PROCESS_SECONDS) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    walls, cpus, calls = zip(*times, strict=True)
    return {
        "senders": len(shares),
        "calls": sum(calls),
        "calls_of_busiest_sender": max(calls),
        "seconds": max(walls),
        "cpu_seconds_of_busiest_sender": max(cpus),
    }


def main() -> None:
    options = parse_options()
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    server = context.Process(target=serve, args=(far,), daemon=True)
    server.start()
    rows: dict[str, dict[str, dict[str, float]]] = {}
    try:
        port = pipe.recv()
        for count in map(int, options.engines.split(",")):
            runs: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
            for _ in range(options.repeats):
                for kind, found in runs.items():
                    found.append(measure(options, port, count, before=kind == "before"))
            rows[str(count)] = {
                kind: {
                    name: round(statistics.median(run[name] for run in found), 3)
                    for name in found[0]
                }
                for kind, found in runs.items()
            }
            for kind, row in rows[str(count)].items():
                print(f"{count} engines, {kind}: {row}", flush=True)
        pipe.send("end")
        server.join(10)
    finally:
        server.kill()
    tensors = sum(1 for _ in named_weights(options.layers))
    print(
        json.dumps(
            {
                "benchmark": "sync_calls",
                "tensors": tensors,
                "repeats": options.repeats,
                "engines": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
