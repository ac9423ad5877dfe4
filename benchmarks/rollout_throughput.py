"""Output tokens a second of slime's rollout loop, over those of raw SGLang under its own load
generator.

    python benchmarks/rollout_throughput.py --shape qwen3-4b

One server, started as a run starts it. In turn, and in alternating order so that drift cancels:
``generate_rollout`` over HTTP (data source, tokenizer, log-probs of every token, samples, a
reward), and ``sglang.bench_serving`` with the same number of requests, lengths, concurrency and
request settings (ids in, log-probs out, no stream, ignore EOS). No prompt comes twice, caches are
flushed before each turn. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]
START_SECONDS = 420.0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-4b", help="of benchmarks/random_model.py")
    parser.add_argument("--model", type=Path, help="folder of the random model; made where absent")
    parser.add_argument("--requests", type=int, default=512, help="of one turn")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=1024)
    parser.add_argument(
        "--repeats", type=int, default=2, help="turns of each, after one short one that warms up"
    )
    parser.add_argument(
        "--seconds", type=float, default=500.0, help="no new pair of turns begins after this"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("/tmp/rollout_throughput"),
        help="folder for logs and JSON",
    )
    parser.add_argument("--device", default="cuda", help="cpu for a trial of the script")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny shape and few tokens, for a trial"
    )
    options, flags = parser.parse_known_args()
    options.flags = flags  # of train.py
    if options.tiny:
        options.shape, options.requests, options.concurrency = "tiny", 16, 8
        options.input_tokens, options.output_tokens = 32, 16
    options.model = options.model or Path("/tmp") / f"random-{options.shape}"
    return options


def make_args(options: argparse.Namespace, prompts: Path) -> Any:
    from slime.config.parser import load_args

    words = [
        "--hf-checkpoint",
        options.model,
        "--prompt-data",
        prompts,
        "--rollout-backend",
        "sglang",
    ]
    words += [
        "--debug-rollout-only",
        "--rollout-num-gpus",
        1,
        "--rollout-batch-size",
        options.requests,
    ]
    words += [
        "--n-samples-per-prompt",
        1,
        "--advantage-estimator",
        "reinforce_plus_plus",
        "--normalize-advantages",
    ]
    words += ["--rollout-max-response-len", options.output_tokens]
    words += [
        "--sglang-server-concurrency",
        options.concurrency,
        "--rm-type",
        "random",
        "--num-rollout",
        100,
    ]
    words += ["--output-dir", options.output / "run"]
    words += ["--rollout-dtype", "bfloat16" if options.device == "cuda" else "float32"]
    if options.device == "cpu":
        words += ["--sglang-device", "cpu", "--sglang-max-total-tokens", 4096]
    else:
        words += [
            "--sglang-attention-backend",
            "triton",
            "--sglang-cuda-graph-max-bs-decode",
            options.concurrency,
        ]
        # 45 s of the start, and no figure here needs them
        words += ["--sglang-disable-prefill-cuda-graph"]
    return load_args([*map(str, words), *options.flags])


def write_prompts(path: Path, count: int, length: int) -> None:
    """Rows of random letters: one token each in the random model's tokenizer."""
    rng = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            text = "".join(rng.choices(string.ascii_lowercase, k=length))
            file.write(json.dumps({"prompt": text, "label": "0"}) + "\n")


class Ours:
    """The rollout loop with a data source of its own."""

    def __init__(self, args: Any) -> None:
        from slime.cluster.generation import GarbageCollection
        from slime.config.hooks import load_function
        from slime.engines.http import init_http_client
        from slime.rollout.state import GenerateState

        init_http_client(args)
        GarbageCollection()
        self.args = args
        self.source = load_function(args.data_source_path)(args)
        self.function = load_function(args.rollout_function_path)
        self.state = GenerateState(args)
        self.state.sampling_params["ignore_eos"] = True
        self.state.tokenizer  # noqa: B018 - loaded once per run, not per turn
        self.rollouts = 0

    def warm_up(self, requests: int) -> None:
        """A small turn: connections, reward workers, the server's kernels."""
        whole = self.args.rollout_batch_size
        self.args.rollout_batch_size = self.args.over_sampling_batch_size = requests
        self.turn()
        self.args.rollout_batch_size = self.args.over_sampling_batch_size = whole

    def turn(self) -> dict[str, float]:
        from slime.data.sample import flatten
        from slime.rollout.base_types import call_rollout_fn

        start = time.perf_counter()
        output: Any = call_rollout_fn(
            self.function, self.args, self.rollouts, self.source, evaluation=False
        )
        seconds = time.perf_counter() - start
        self.rollouts += 1
        samples = flatten(output.samples)
        tokens = sum(sample.response_length for sample in samples)
        assert all(
            len(sample.rollout_log_probs or []) == sample.response_length for sample in samples
        )
        return {
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "requests": len(samples),
        }


def raw_turn(options: argparse.Namespace, url: str, requests: int, seed: int) -> dict[str, float]:
    """``sglang.bench_serving``, in a process of its own."""
    result = options.output / f"bench_serving_{seed}.jsonl"
    result.unlink(missing_ok=True)
    command: list[Any] = [
        sys.executable,
        "-c",
        _BENCH_SERVING,
        "--backend",
        "sglang",
        "--base-url",
        url,
    ]
    command += [
        "--dataset-name",
        "random-ids",
        "--num-prompts",
        requests,
        "--random-input-len",
        options.input_tokens,
    ]
    command += [
        "--random-output-len",
        options.output_tokens,
        "--random-range-ratio",
        1.0,
        "--tokenize-prompt",
    ]
    command += [
        "--max-concurrency",
        options.concurrency,
        "--return-logprob",
        "--disable-stream",
        "--disable-tqdm",
    ]
    command += [
        "--model",
        options.model,
        "--tokenizer",
        options.model,
        "--seed",
        seed,
        "--output-file",
        result,
    ]
    command += [
        "--warmup-requests",
        0,
        "--extra-request-body",
        json.dumps({"logprob_start_len": -1}),
    ]
    env = dict(os.environ)
    if options.device == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    limit = max(60.0, options.seconds)
    done = subprocess.run(
        list(map(str, command)), env=env, capture_output=True, text=True, timeout=limit
    )
    (options.output / f"bench_serving_{seed}.log").write_text(done.stdout + done.stderr)
    if done.returncode or not result.exists():
        raise RuntimeError(
            f"bench_serving ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    said = json.loads(result.read_text().splitlines()[-1])
    if said["completed"] != requests:
        raise RuntimeError(f"bench_serving completed {said['completed']} of {requests} requests")
    return {
        "seconds": said["duration"],
        "tokens": said["total_output_tokens"],
        "tokens_per_second": said["output_throughput"],
        "requests": said["completed"],
    }


_BENCH_SERVING = """
import importlib.machinery, importlib.util, os, runpy, sys, types
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from slime.plugins.sglang.kernels import install
    install()
import transformers
if importlib.util.find_spec("datasets") is None:  # its other data sets need it, random ids do not
    absent = types.ModuleType("datasets")
    absent.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
    absent.load_dataset = None
    sys.modules["datasets"] = absent
sys.argv[0] = "bench_serving"
runpy.run_module("sglang.bench_serving", run_name="__main__")
"""


def measure(options: argparse.Namespace, args: Any, engine: Any) -> dict[str, Any]:
    from slime.engines.handle import EngineHandle
    from slime.utils.async_utils import run

    host, port = engine.url.split("//")[1].split(":")
    args.sglang_router_ip, args.sglang_router_port = host, int(port)
    handle = EngineHandle(engine.url)
    ours = Ours(args)
    started = time.perf_counter()
    turns: dict[str, list[dict[str, float]]] = {"ours": [], "raw": []}

    def one(name: str, seed: int, requests: int) -> dict[str, float]:
        run(handle.flush_cache())
        result = ours.turn() if name == "ours" else raw_turn(options, engine.url, requests, seed)
        print(
            f"{name:5} {result['tokens_per_second']:9.0f} tokens/s  {result['seconds']:6.1f} s",
            flush=True,
        )
        return result

    print("warm-up (not counted)", flush=True)
    ours.warm_up(options.concurrency)
    one("raw", 999, options.concurrency)
    for i in range(options.repeats):
        spent = time.perf_counter() - started
        if turns["ours"] and spent + spent / i > options.seconds:
            print(f"no time for pair {i + 1}")
            break
        for name in ("ours", "raw") if i % 2 == 0 else ("raw", "ours"):
            turns[name].append(one(name, 1000 + i, options.requests))
    info = run(handle.info())
    medians = {
        name: statistics.median(turn["tokens_per_second"] for turn in made)
        for name, made in turns.items()
        if made
    }
    return {
        "benchmark": "rollout_throughput",
        "engine": f"{info.kind} {info.version}",
        "shape": options.shape,
        "requests": options.requests,
        "concurrency": options.concurrency,
        "input_tokens": options.input_tokens,
        "output_tokens": options.output_tokens,
        "turns": turns,
        "ours_tokens_per_second": round(medians["ours"], 1),
        "raw_tokens_per_second": round(medians["raw"], 1),
        "ratio": round(medians["ours"] / medians["raw"], 4),
    }


def main() -> None:
    options = parse_options()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from random_model import write_model

    options.output.mkdir(parents=True, exist_ok=True)
    write_model(options.shape, options.model)
    prompts = options.output / "prompts.jsonl"
    write_prompts(
        prompts, options.repeats * options.requests + options.concurrency, options.input_tokens
    )
    args = make_args(options, prompts)
    from slime.engines.launch import EngineSettings, plan_engines, start_engine

    started = time.perf_counter()
    engine = start_engine(
        EngineSettings.from_args(args),
        plan_engines(args)[0],
        log_path=options.output / "engine.log",
    )
    try:
        engine.wait_ready(START_SECONDS)
        print(f"server up in {time.perf_counter() - started:.0f} s", flush=True)
        result = measure(options, args, engine)
    finally:
        engine.stop()
    print(f"slime's rollout loop {result['ours_tokens_per_second']:.0f} tokens/s, raw "
          f"{result['raw_tokens_per_second']:.0f}: ratio {result['ratio']:.3f}")  # fmt: skip
    line = json.dumps(result)
    (options.output / "rollout_throughput.json").write_text(line + "\n")
    print(line, flush=True)


if __name__ == "__main__":
    main()
