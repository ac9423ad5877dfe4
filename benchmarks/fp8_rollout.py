"""Generation with weights as 8-bit floats beside bfloat16: output tokens/s, bytes and seconds of a
sync, and the gap.

    python benchmarks/fp8_rollout.py --shape qwen3-4b

For each precision, one server is started as a run starts it (``--rollout-quantization fp8`` or
without), all weights are sent to it twice, the log-probs of random sequences are compared with
those of transformers on the weights before they are quantized, and requests of random tokens are
answered at each concurrency. The settings of the servers are otherwise equal. With random weights
all log-probs are near those of a uniform distribution, so that the gap says little; ``--model``
names a real checkpoint. Other words are flags of train.py. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]
START_SECONDS = 300.0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-4b", help="of benchmarks/random_model.py")
    parser.add_argument(
        "--model", type=Path, help="a Hugging Face folder; default: random weights in the shape"
    )
    parser.add_argument(
        "--precisions", default="bfloat16,fp8", help="comma-separated, in the order of measurement"
    )
    parser.add_argument("--concurrency", default="64,256", help="comma-separated")
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument(
        "--turns", type=int, default=2, help="requests per place, one after the other"
    )
    parser.add_argument("--backend", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument(
        "--device", default="cuda", help="cpu for a trial of the script with the embedded engine"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("/tmp/fp8_rollout"), help="folder for logs and JSON"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny shape and few tokens, for a trial"
    )
    options, flags = parser.parse_known_args()
    options.flags = flags
    if options.tiny:
        options.shape, options.concurrency, options.input_tokens, options.output_tokens = (
            "tiny",
            "2,4",
            32,
            8,
        )
    options.random = options.model is None
    options.model = options.model or Path("/tmp") / f"random-{options.shape}"
    return options


def make_args(options: argparse.Namespace, precision: str) -> Any:
    from slime.config.parser import load_args

    prompts = options.output / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    most = max(map(int, options.concurrency.split(",")))
    on_cuda = options.device == "cuda"
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
    words += [
        "--output-dir",
        options.output / "run",
        "--rollout-dtype",
        "bfloat16" if on_cuda else "float32",
    ]
    words += ["--no-check-weight-update-equal"]
    if options.backend == "sglang":
        words += ["--sglang-attention-backend", "triton", "--sglang-cuda-graph-max-bs-decode", most]
        words += ["--sglang-disable-prefill-cuda-graph"]
        words += ["--sglang-mem-fraction-static", 0.7]  # the sent tensors need room on the same GPU
    if precision == "fp8":
        words += ["--rollout-quantization", "fp8"]
    return load_args([*map(str, words), *options.flags])


def tensors_of(model: Path, device: str, dtype: Any) -> list[tuple[str, Any]]:
    from slime.models.stored import StoredWeights

    stored = StoredWeights(model)
    return [(name, stored.get(name).to(device, dtype)) for name in stored.shapes()]


def sequences(options: argparse.Namespace, vocab: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocab) for _ in range(options.input_tokens)] for _ in range(4)]


def plain_log_probs(
    options: argparse.Namespace, dtype: Any, chosen: list[list[int]]
) -> list[list[float]]:
    """Of all tokens but the first, computed by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = (
        AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    )
    found = []
    with torch.inference_mode():
        for tokens in chosen:
            ids = torch.tensor([tokens], device=options.device)
            scores = model(ids).logits[0, :-1].float().log_softmax(-1)
            found.append(scores.gather(1, ids[0, 1:, None])[:, 0].tolist())
    del model
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return found


def sync(args: Any, engine: Any, tensors: list[tuple[str, Any]], number: int) -> dict[str, float]:
    from slime.utils.async_utils import run
    from slime.weights.settings import WeightSyncSettings
    from slime.weights.sync import sync_weights
    from slime.weights.transports import create_transport

    settings = WeightSyncSettings.from_args(args)
    transport = create_transport(settings, colocated_host=True)
    report = sync_weights(
        settings, iter(tensors), [engine], transport, f"0.{number}", is_sender=True
    )
    run(transport.close())
    assert report is not None
    return {
        "sync_seconds": round(report.seconds, 3),
        "pause_seconds": round(report.pause_seconds, 3),
        "audit_seconds": round(report.audit_seconds, 3),
        "sync_gb": round(report.nbytes / 1e9, 3),
        "compared_tensors": len(report.digests),
    }


async def answer_all(
    options: argparse.Namespace, engine: Any, concurrency: int, vocab: int
) -> float:
    """Output tokens/s of ``concurrency`` requests at a time."""
    rng = random.Random(2)
    places = asyncio.Semaphore(concurrency)

    async def one() -> int:
        body = {
            "input_ids": [rng.randrange(vocab) for _ in range(options.input_tokens)],
            "sampling_params": {
                "max_new_tokens": options.output_tokens,
                "temperature": 1.0,
                "ignore_eos": True,
            },
            "return_logprob": True,
        }
        async with places:
            answer = await engine.generate(body)
        return len(answer["meta_info"]["output_token_logprobs"])

    start = time.perf_counter()
    counts = await asyncio.gather(*(one() for _ in range(concurrency * options.turns)))
    return sum(counts) / (time.perf_counter() - start)


def measure(
    options: argparse.Namespace, precision: str, vocab: int, expected: list[list[float]]
) -> dict[str, Any]:
    import torch

    from slime.engines.handle import EngineHandle
    from slime.engines.launch import EngineSettings, plan_engines, start_engine
    from slime.utils.async_utils import run
    from slime.weights.audit import score

    args = make_args(options, precision)
    started = time.perf_counter()
    log = options.output / f"engine-{precision}.log"
    process = start_engine(EngineSettings.from_args(args), plan_engines(args)[0], log_path=log)
    try:
        written = time.perf_counter() - started
        process.wait_ready(START_SECONDS)
        row: dict[str, Any] = {
            "precision": precision,
            "copy_seconds": round(written, 1),
            "start_seconds": round(time.perf_counter() - started, 1),
        }
        engine = EngineHandle(process.url)
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        tensors = tensors_of(options.model, options.device, dtype)
        sync(args, engine, tensors, 0)  # connects, and compiles kernels
        row |= sync(args, engine, tensors, 1)
        del tensors
        gaps = [
            abs(a - b)
            for tokens, values in zip(sequences(options, vocab), expected, strict=True)
            for a, b in zip(run(score(engine, tokens)), values, strict=True)
        ]
        row["gap_mean"], row["gap_max"] = round(statistics.fmean(gaps), 5), round(max(gaps), 4)
        run(answer_all(options, engine, 4, vocab))
        for concurrency in map(int, options.concurrency.split(",")):
            rate = run(answer_all(options, engine, concurrency, vocab))
            row[f"tokens_per_second_{concurrency}"] = round(rate, 1)
            print(f"{precision}: {rate:.0f} tokens/s at concurrency {concurrency}", flush=True)
        return row
    except BaseException:
        print(process.log_tail()[-3000:], flush=True)
        raise
    finally:
        process.stop()


def main() -> None:
    options = parse_options()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    from random_model import write_model

    options.output.mkdir(parents=True, exist_ok=True)
    if options.random:
        write_model(options.shape, options.model)
    vocab = int(json.loads((options.model / "config.json").read_text())["vocab_size"])
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    expected = plain_log_probs(options, dtype, sequences(options, vocab))
    rows = [
        measure(options, precision, vocab, expected) for precision in options.precisions.split(",")
    ]
    for row in rows:
        print(row, flush=True)
    by_name = {row["precision"]: row for row in rows}
    result: dict[str, Any] = {
        "benchmark": "fp8_rollout",
        "model": options.shape if options.random else options.model.name,
        "backend": options.backend,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "input_tokens": options.input_tokens,
        "output_tokens": options.output_tokens,
        "rows": rows,
    }
    if {"bfloat16", "fp8"} <= by_name.keys():
        rates = [name for name in rows[0] if name.startswith("tokens_per_second_")]
        result["fp8_over_bfloat16"] = {
            name.removeprefix("tokens_per_second_"): round(
                by_name["fp8"][name] / by_name["bfloat16"][name], 3
            )
            for name in rates
        }
        print(f"tokens/s of fp8 over bfloat16 by concurrency: {result['fp8_over_bfloat16']}")
    line = json.dumps(result)
    (options.output / "fp8_rollout.json").write_text(line + "\n")
    print(line, flush=True)
    sys.stdout.flush()
    os._exit(0)  # without the destructors of process groups, which can wait for each other


if __name__ == "__main__":
    main()
