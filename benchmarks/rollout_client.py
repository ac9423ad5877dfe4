"""What the rollout loop itself costs, next to a bare load generator: milliseconds of CPU per
sample.

    python benchmarks/rollout_client.py                       # 512 samples of 1024 tokens, 256 at a time

A server in a process of its own answers every request after ``--delay`` seconds with the same
``--new`` tokens and log-probs, as SGLang would. The bare generator sends the same bodies over the
same kind of connection and throws the bytes away. What the loop adds (tokenising, decoding,
samples, rewards, bookkeeping) is CPU time of the client: at ``--rate`` output tokens/s of real
engines it is this share of one core, and it only slows generation down as far as it keeps a
finished request from being followed by the next.

With ``--workers N`` the loop hands its groups to N rollout workers (``--rollout-workers``; 0:
none), and the CPU of this process, which is then the rollout manager's, stands beside that of the
workers. With ``--delay 0`` the time on the clock is the rate at which N processes read answers.

``--engines N`` stands for N engines behind the router: the loop has N times ``--concurrency``
requests in flight. With the CPU time of each process and the memory that its samples take, this is
how the cost of a rollout grows with the engines, the samples and their length. ``--rollouts 1
--no-bare`` leaves out what only the comparison needs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil


def main() -> None:
    options = parse()
    if options.serve:
        serve(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(command(options), stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            result = measure(options, url, Path(folder))
        finally:
            server.terminate()
            server.wait(10)
    show(options, result)
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--engines", type=int, default=1, help="simulated engines (default: 1)")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=256,
        help="requests in flight of each engine (default: 256)",
    )
    parser.add_argument(
        "--rollouts", type=int, default=2, help="of which the last one counts (default: 2)"
    )
    parser.add_argument("--no-bare", action="store_true", help="without the bare load generator")
    parser.add_argument("--prompt", type=int, default=256, help="tokens per prompt")
    parser.add_argument("--new", type=int, default=1024, help="tokens per answer")
    parser.add_argument("--delay", type=float, default=4.0, help="seconds until an answer")
    parser.add_argument("--workers", type=int, default=0, help="rollout workers")
    parser.add_argument(
        "--rate",
        type=float,
        default=15660.0,
        help="output tokens/s of real engines to compare with",
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def command(options: argparse.Namespace) -> list[str]:
    return [
        sys.executable,
        __file__,
        "--serve",
        "--new",
        str(options.new),
        "--delay",
        str(options.delay),
    ]


def serve(options: argparse.Namespace) -> None:
    """Answer for ever; prints its URL first."""
    from aiohttp import web

    draw = random.Random(0)
    # Engines send log-probs that are exact in float32, which samples keep in four bytes.
    scored = [
        [float(np.float32(-3 * draw.random())), draw.randrange(4, 60), None]
        for _ in range(options.new)
    ]
    meta: dict[str, Any] = {
        "output_token_logprobs": scored,
        "finish_reason": {"type": "length", "length": options.new},
    }
    meta |= {"weight_version": "0.1", "prompt_tokens": options.prompt, "cached_tokens": 0}
    meta |= {"completion_tokens": options.new, "id": "0" * 32, "e2e_latency": options.delay}
    text = " ".join(f"w{token}" for _, token, _ in scored)
    body = json.dumps(
        {"text": text, "output_ids": [token for _, token, _ in scored], "meta_info": meta}
    ).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(options.delay)
        return web.Response(body=body, content_type="application/json")

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


def measure(options: argparse.Namespace, url: str, folder: Path) -> dict[str, Any]:
    """Bare, loop, bare, loop; the last of each counts (the first loads what is loaded once)."""
    args, source = prepare(options, url, folder)
    bare_wall = bare_cpu = loop_wall = loop_cpu = 0.0
    with rollout_workers(args, options.workers, folder) as workers:
        own = psutil.Process()
        for rollout_id in range(options.rollouts):
            if not options.no_bare:
                _, bare_wall, bare_cpu = timed(bare(options, url))
            before, memory = [cpu_seconds(process) for process in workers], private_bytes(own)
            output, loop_wall, loop_cpu = timed(loop(args, rollout_id, source))
            used = [
                cpu_seconds(process) - since for process, since in zip(workers, before, strict=True)
            ]
            memory = private_bytes(own) - memory
            del output
        peaks = [round(peak_bytes(process) / 2**20) for process in (own, *workers)]
    tokens = options.samples * options.new
    every = [loop_cpu, *used]
    cpu = {"bare": bare_cpu, "loop": loop_cpu, "workers": sum(used)}
    cpu = {name: 1e3 * seconds / options.samples for name, seconds in cpu.items()}
    return {
        "samples": options.samples, "concurrency": options.concurrency, "new": options.new, "delay": options.delay,
        "bare_wall_s": bare_wall, "loop_wall_s": loop_wall,
        "workers": options.workers, "workers_cpu_ms_per_sample": cpu["workers"],
        "bare_cpu_ms_per_sample": cpu["bare"], "loop_cpu_ms_per_sample": cpu["loop"],
        "share_of_a_core_at_rate": 1e-3 * cpu["loop"] * options.rate / options.new, "rate": options.rate,
        "engines": options.engines, "busiest_cpu_us_per_token": 1e6 * max(every) / tokens,
        "all_cpu_us_per_token": 1e6 * sum(every) / tokens, "cpu_s": [round(seconds, 2) for seconds in every],
        "kept_bytes_per_token": memory / tokens, "peak_mib": peaks,
    }  # fmt: skip


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def private_bytes(process: psutil.Process) -> int:
    """Without shared memory: the pages of Ray's object store are not this process's alone."""
    return int(process.memory_full_info().uss)


def peak_bytes(process: psutil.Process) -> int:
    """The largest resident memory that a process has had."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@contextlib.contextmanager
def rollout_workers(args: Any, count: int, folder: Path) -> Iterator[list[psutil.Process]]:
    """Generate the groups of the block in so many rollout workers; yields their processes."""
    if not count:
        yield []
        return
    from slime.plugins.actors.ray_cluster import connect, disconnect
    from slime.plugins.workers.workers import start
    from slime.rollout.state import GenerateState

    connect()
    fleet: Any = SimpleNamespace(
        shares=0, engines=[], log_dir=folder, addresses_of=lambda worker: {},
        monitor=SimpleNamespace(wake=lambda: None),
    )  # fmt: skip
    workers = start(args.with_values(rollout_workers=count, start_timeout=120.0), fleet)
    try:
        GenerateState(args).generator = workers
        yield [psutil.Process(pid) for pid in workers.pids()]
    finally:
        workers.stop()
        disconnect()


def timed(work: Any) -> tuple[Any, float, float]:
    """What the work returned, its seconds on the clock, and those of this process's CPU."""
    from slime.utils.async_utils import run

    wall, cpu = time.perf_counter(), time.process_time()
    value = run(work)
    return value, time.perf_counter() - wall, time.process_time() - cpu


async def bare(options: argparse.Namespace, url: str) -> None:
    import aiohttp

    ids = [4 + i % 56 for i in range(options.prompt)]
    body = json.dumps(
        {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": options.new},
            "return_logprob": True,
        }
    )
    limit = asyncio.Semaphore(options.engines * options.concurrency)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            async with limit, session.post(f"{url}/generate", data=body) as answer:
                await answer.read()

        await asyncio.gather(*(one() for _ in range(options.samples)))


async def loop(args: Any, rollout_id: int, source: Any) -> Any:
    from slime.data.sample import flatten
    from slime.rollout.sglang_rollout import generate_rollout_async

    output = await generate_rollout_async(args, rollout_id, source)
    assert sum(sample.response_length for sample in flatten(output.samples)) > 0
    return output


def prepare(options: argparse.Namespace, url: str, folder: Path) -> tuple[Any, Any]:
    """Arguments of a real run whose router is the server here, and its data source."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    from slime.cluster.generation import GarbageCollection
    from slime.config.parser import load_args
    from slime.data.source import RolloutDataSourceWithBuffer
    from slime.engines.http import init_http_client

    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", eos_token="w1").save_pretrained(
        folder
    )
    LlamaConfig(vocab_size=64).save_pretrained(folder)
    words = " ".join(f"w{4 + i % 56}" for i in range(options.prompt))
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": words, "label": "1"}) + "\n")
    args = load_args([
        "--hf-checkpoint", str(folder), "--prompt-data", str(folder / "prompts.jsonl"), "--rm-type", "random",
        "--rollout-batch-size", str(options.samples // 8), "--n-samples-per-prompt", "8",
        "--num-rollout", str(options.rollouts), "--phase-timeout", "3600",
        "--rollout-max-response-len", str(options.new), "--sglang-server-concurrency", str(options.concurrency),
        "--rollout-num-gpus", "1", "--train-backend", "fsdp", "--rollout-backend", "embedded", "--no-deterministic",
    ])  # fmt: skip
    # the flag refuses more than this machine can run
    args = args.with_values(rollout_num_gpus=options.engines)
    args.sglang_router_ip, port = url.removeprefix("http://").split(":")
    args.sglang_router_port = int(port)
    init_http_client(args)
    GarbageCollection()
    return args, RolloutDataSourceWithBuffer(args)


def show(options: argparse.Namespace, result: dict[str, Any]) -> None:
    in_flight = options.engines * options.concurrency
    print(
        f"{options.samples} samples of {options.new} tokens, {in_flight} at a time, "
        f"{options.delay} s each"
    )
    for name in ("loop",) if options.no_bare else ("bare", "loop"):
        wall, cpu = result[f"{name}_wall_s"], result[f"{name}_cpu_ms_per_sample"]
        print(f"  {name:<5}{wall:8.2f} s on the clock {cpu:8.2f} ms of CPU per sample")
    if options.workers:
        print(
            f"  {options.workers} workers{result['workers_cpu_ms_per_sample']:19.2f} ms of CPU "
            "per sample, together"
        )
    busiest, every = result["busiest_cpu_us_per_token"], result["all_cpu_us_per_token"]
    print(
        f"  per token {busiest:.3f} µs of CPU of the busiest process, {every:.3f} of all, and "
        f"{result['kept_bytes_per_token']:.1f} bytes in this one; peaks {result['peak_mib']} MiB")  # fmt: skip
    share = result["share_of_a_core_at_rate"]
    print(f"  at {options.rate:.0f} output tokens/s the loop keeps {share:.1%} of one core busy")


if __name__ == "__main__":
    main()
