"""What a colocated engine gives back and how long that takes: residue, release, resume, and the
same text after.

    python benchmarks/colocate.py --shape qwen3-4b

One engine, started as a run starts it (``--offload-rollout``). Per cycle: greedy texts, flush and
release, memory, resume of the weights' room, the weights once more by the transport of colocated
runs, resume of the cache, the same texts. (``benchmarks/h200_train.py`` has the cycle with a
trainer in it.) The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]
START_SECONDS = 420.0
GIB, GB = 2**30, 1e9
PROMPTS = (
    "Natalia sold clips to 48 of her friends",
    "What is 7 times 8?",
    "abc",
    "Once upon a time there was a GPU",
)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-4b", help="of benchmarks/random_model.py")
    parser.add_argument("--model", type=Path, help="folder of the random model; made where absent")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--backend", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument(
        "--output", type=Path, default=Path("/tmp/colocate"), help="folder for logs and JSON"
    )
    parser.add_argument("--device", default="cuda", help="cpu for a trial of the script")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, for a trial")
    options, flags = parser.parse_known_args()
    options.flags = flags  # of train.py
    if options.tiny:
        options.shape = "tiny"
    options.model = options.model or Path("/tmp") / f"random-{options.shape}"
    return options


def make_args(options: argparse.Namespace) -> Any:
    from slime.config.parser import load_args

    prompts = options.output / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    words = [
        "--hf-checkpoint",
        options.model,
        "--prompt-data",
        prompts,
        "--rollout-backend",
        options.backend,
    ]
    words += [
        "--train-backend",
        "fsdp",
        "--colocate",
        "--actor-num-gpus-per-node",
        1,
        "--num-rollout",
        1,
    ]
    words += ["--output-dir", options.output / "run", "--no-audit-weights"]
    words += ["--rollout-dtype", "bfloat16" if options.device == "cuda" else "float32"]
    if options.backend == "sglang" and options.device == "cpu":
        words += ["--sglang-device", "cpu", "--sglang-max-total-tokens", 4096]
    elif options.backend == "sglang":
        words += ["--sglang-attention-backend", "triton", "--sglang-cuda-graph-max-bs-decode", 64]
        words += ["--sglang-disable-prefill-cuda-graph"]
    return load_args([*map(str, words), *options.flags])


def device_bytes() -> int:
    """In use on the GPU by everybody but this process's own tensors; 0 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def weights(model: Path, device: str, dtype: Any) -> Iterator[tuple[str, Any]]:
    from safetensors.torch import load_file

    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file, device=device).items():
            yield name, tensor.to(dtype)


class Engine:
    """The engine's control calls with a clock, on the background loop."""

    def __init__(self, url: str) -> None:
        from slime.engines.handle import EngineHandle

        self.handle = EngineHandle(url)

    def seconds(self, call: str, *arguments: Any) -> float:
        from slime.utils.async_utils import run

        start = time.perf_counter()
        run(getattr(self.handle, call)(*arguments))
        return time.perf_counter() - start

    def answers(self) -> tuple[list[str], list[float]]:
        """Greedy texts, and the log-prob of every token of prompts and answers."""
        from slime.utils.async_utils import run

        params = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
        texts, scores = [], []
        for prompt in PROMPTS:
            body = {
                "text": prompt,
                "sampling_params": params,
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            answer = run(self.handle.generate(body))
            meta = answer["meta_info"]
            texts.append(answer["text"])
            scored = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
            scores += [float(entry[0]) for entry in scored]
        return texts, scores


def cycle(
    options: argparse.Namespace, args: Any, engine: Engine, tensors: Any, number: int
) -> dict[str, Any]:
    from slime.utils.async_utils import run
    from slime.weights.settings import WeightSyncSettings
    from slime.weights.sync import sync_weights
    from slime.weights.transports import create_transport

    engine.seconds("flush_cache")  # a cached prompt has no log-probs
    before, scores = engine.answers()
    row: dict[str, Any] = {"awake_bytes": device_bytes()}
    row["flush_seconds"] = engine.seconds("flush_cache")
    row["release_seconds"] = engine.seconds("release")
    row["asleep_bytes"] = device_bytes()
    row["resume_weights_seconds"] = engine.seconds("resume", ("weights",))
    settings = WeightSyncSettings.from_args(args)
    transport = create_transport(settings, colocated_host=True)
    start = time.perf_counter()
    report = sync_weights(
        settings, tensors, [engine.handle], transport, f"0.{number}", is_sender=True
    )
    row["sync_seconds"] = time.perf_counter() - start
    run(transport.close())
    assert report is not None
    row["sync_bytes"] = report.nbytes
    row["resume_cache_seconds"] = engine.seconds("resume", ("kv_cache", "cuda_graph"))
    row["awake_again_bytes"] = device_bytes()
    after, again = engine.answers()
    row["text_equal"] = after == before
    row["logprob_difference"] = max(abs(a - b) for a, b in zip(scores, again, strict=True))
    row["text"] = before[0][:80]
    row["seconds"] = sum(
        row[f"{name}_seconds"] for name in ("flush", "release", "resume_weights", "resume_cache")
    )
    return row


def main() -> None:
    options = parse_options()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    from random_model import write_model

    options.output.mkdir(parents=True, exist_ok=True)
    write_model(options.shape, options.model)
    args = make_args(options)
    from slime.engines.launch import EngineSettings, plan_engines, start_engine

    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.zeros(1, device="cuda")
    without = device_bytes()
    process = start_engine(
        EngineSettings.from_args(args),
        plan_engines(args)[0],
        log_path=options.output / "engine.log",
    )
    try:
        process.wait_ready(START_SECONDS)
        engine = Engine(process.url)
        rows = []
        dtype = torch.bfloat16 if on_cuda else torch.float32
        tensors = list(weights(options.model, "cuda" if on_cuda else "cpu", dtype))
        for number in range(options.cycles):
            rows.append(cycle(options, args, engine, tensors, number))
            print(
                {k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()},
                flush=True,
            )
    finally:
        process.stop()
    residue = max(row["asleep_bytes"] for row in rows) - without
    result = {
        "benchmark": "colocate",
        "shape": options.shape,
        "backend": options.backend,
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "engine_gb": round((rows[0]["awake_bytes"] - without) / GB, 2),
        "residue_gb": round(residue / GB, 2),
        "residue_gib": round(residue / GIB, 2),
        "release_and_resume_seconds": round(statistics.median(row["seconds"] for row in rows), 3),
        "grown_gb": round((rows[-1]["awake_again_bytes"] - rows[0]["awake_again_bytes"]) / GB, 3),
        "text_equal": all(row["text_equal"] for row in rows),
        "logprob_difference": max(row["logprob_difference"] for row in rows),
        "cycles": rows,
    }
    print(
        f"engine {result['engine_gb']} GB, released to {result['residue_gb']} GB; release + "
        f"resume {result['release_and_resume_seconds']} s; same text after: "
        f"{result['text_equal']} (log-probs differ by {result['logprob_difference']:.1e}); later "
        f"cycles use {result['grown_gb']} GB more"
    )
    line = json.dumps(result)
    (options.output / "colocate.json").write_text(line + "\n")
    print(line, flush=True)


if __name__ == "__main__":
    main()
