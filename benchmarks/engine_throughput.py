"""The embedded engine against a bare decode loop and against transformers' ``generate``, in one
run.

All three make the same number of tokens for the same prompts with the same model, dtype and
threads, at temperature 1, without stopping early:

- *bare*: prefill untimed, then nothing but forward and draw, on one static batch. No log-probs, no
  HTTP, no scheduling. ``plain``: as transformers loads the model; ``onednn``: with slime's faster
  linear layers.
- *generate*: ``model.generate`` on the same batch, prefill included, as transformers loads the
  model.
- *engine*: one HTTP request per sequence, all at once, log-probs of every token returned, prefill
  included.

The last line is JSON; ``ratio_bare`` and ``ratio_generate`` are the engine's tokens/s over theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default=str(CHECKOUT / "models" / "SmolLM2-135M-Instruct"),
        help="Hugging Face folder",
    )
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument(
        "--samples-per-prompt", type=int, default=8, help="identical prompts in a row"
    )
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--repeats", type=int, default=2, help="each side runs so often, in turn; the median counts"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="measure the engine's deterministic mode as well",
    )
    parser.add_argument("--skip-generate", action="store_true")
    return parser.parse_args()


def make_prompts(options: argparse.Namespace, vocab: int) -> list[list[int]]:
    """``concurrency`` prompts in groups of identical ones."""
    import torch

    groups = -(-options.concurrency // options.samples_per_prompt)
    ids = torch.randint(
        5, vocab - 5, (groups, options.prompt_tokens), generator=torch.Generator().manual_seed(0)
    )
    return [row for row in ids.tolist() for _ in range(options.samples_per_prompt)][
        : options.concurrency
    ]


def bare_loop(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Tokens per second of forward + draw."""
    import torch
    from transformers import DynamicCache

    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        ids = torch.tensor(prompts, device=model.device)
        output = model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        start = time.perf_counter()
        for _ in range(new_tokens):
            probs = torch.softmax(output.logits[:, -1].float(), dim=-1)
            token = torch.multinomial(probs, 1)
            output = model(input_ids=token, past_key_values=cache, logits_to_keep=1)
        _sync(model)
        return len(prompts) * new_tokens / (time.perf_counter() - start)


def transformers_generate(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Tokens per second of ``model.generate``."""
    import torch

    ids = torch.tensor(prompts, device=model.device)
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
    )
    _sync(model)
    seconds = time.perf_counter() - start
    assert out.shape[1] == ids.shape[1] + new_tokens
    return len(prompts) * new_tokens / seconds


def _sync(model: Any) -> None:
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize()


async def engine_round(
    url: str, prompts: list[list[int]], new_tokens: int
) -> tuple[float, dict[str, int]]:
    """Tokens per second over HTTP, all requests at once, and what the engine says it took from its
    cache.
    """
    from slime.engines import http

    async def one(ids: list[int], seed: int) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": new_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "sampling_seed": seed,
        }
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        return dict(await http.post(f"{url}/generate", body))

    start = time.perf_counter()
    answers = await asyncio.gather(*(one(ids, seed) for seed, ids in enumerate(prompts)))
    seconds = time.perf_counter() - start
    assert all(
        len(answer["meta_info"]["output_token_logprobs"]) == new_tokens for answer in answers
    )
    cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    await http.post(f"{url}/flush_cache", {})
    return len(prompts) * new_tokens / seconds, {"cached": cached, "prompt": sum(map(len, prompts))}


def measure_engine(
    options: argparse.Namespace, prompts: list[list[int]], deterministic: bool, repeats: int
) -> tuple[list[float], dict[str, Any]]:
    """Start an engine, warm it up, run it ``repeats`` times, stop it."""
    from slime.engines.launch import EngineSettings
    from slime.plugins.embedded.server import start_embedded_engine
    from slime.utils.async_utils import run

    start = time.perf_counter()
    settings = EngineSettings(
        options.model,
        dtype=options.dtype,
        device=options.device,
        max_running_requests=max(options.concurrency, 1),
        threads=options.threads,
        deterministic=deterministic,
    )
    engine = start_embedded_engine(settings, 0)
    try:
        engine.wait_ready(300)
        facts: dict[str, Any] = {"seconds_to_healthy": round(time.perf_counter() - start, 2)}
        run(engine_round(engine.url, prompts, 4))
        speeds = []
        for _ in range(repeats):
            speed, tokens = run(engine_round(engine.url, prompts, options.new_tokens))
            speeds.append(speed)
        return speeds, {**facts, **tokens}
    finally:
        engine.stop()


def main() -> None:
    options = parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # as the engine sets it, so that all sides have the same
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from slime.models.loading import load_hf_model

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    plain = (
        AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    )
    fast = load_hf_model(options.model, dtype, options.device)
    prompts = make_prompts(options, plain.config.vocab_size)
    speeds: dict[str, list[float]] = {
        "bare_plain": [],
        "bare_onednn": [],
        "generate": [],
        "engine": [],
    }
    bare_loop(plain, prompts, 2)
    bare_loop(fast, prompts, 2)
    facts: dict[str, Any] = {}
    for _ in range(options.repeats):
        speeds["bare_plain"].append(bare_loop(plain, prompts, options.new_tokens))
        speeds["bare_onednn"].append(bare_loop(fast, prompts, options.new_tokens))
        if not options.skip_generate:
            speeds["generate"].append(transformers_generate(plain, prompts, options.new_tokens))
        got, facts = measure_engine(options, prompts, False, 1)
        speeds["engine"] += got
    if options.deterministic:
        speeds["engine_deterministic"], _ = measure_engine(options, prompts, True, options.repeats)
    median = {name: statistics.median(values) for name, values in speeds.items() if values}
    for name, value in median.items():
        print(
            f"{name:22s} {value:8.1f} tokens/s   ({', '.join(f'{v:.0f}' for v in speeds[name])})",
            file=sys.stderr,
        )
    print(json.dumps(report(options, median, facts)))


def report(
    options: argparse.Namespace, median: dict[str, float], facts: dict[str, Any]
) -> dict[str, Any]:
    """The figures as one flat dictionary."""
    result: dict[str, Any] = {
        "benchmark": "engine_throughput",
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "device": options.device,
        "threads": options.threads,
        "concurrency": options.concurrency,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        **{f"{name}_tokens_per_s": round(value, 1) for name, value in median.items()},
        "ratio_bare": round(median["engine"] / median["bare_plain"], 3),
        "ratio_bare_onednn": round(median["engine"] / median["bare_onednn"], 3),
    }
    if "generate" in median:
        result["ratio_generate"] = round(median["engine"] / median["generate"], 3)
    if "engine_deterministic" in median:
        result["ratio_deterministic"] = round(median["engine_deterministic"] / median["engine"], 3)
    return {**result, **facts}


if __name__ == "__main__":
    main()
