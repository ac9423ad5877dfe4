"""``--true-on-policy`` with SGLang: whether its log-probs are the trainer's, and its tokens per second.

    python benchmarks/true_on_policy_sglang.py --output /tmp/true --model qwen3-0.6b --server exact
    python benchmarks/true_on_policy_sglang.py --output /tmp/true --server train
    python benchmarks/true_on_policy_sglang.py --output /tmp/true --model tiny --device cpu --server exact

One H200, two to three minutes each, of which SGLang's start is the longest. Servers: ``exact`` (the
mode), ``default`` (SGLang as it is) and ``deterministic`` (``--enable-deterministic-inference``).
Each generates samples of mixed lengths at temperature 1 for concurrent requests, twice, and is then
stopped; trainers with the mode and without score the second ones. ``train`` is a run of three
rollouts in the mode. Each result is a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from true_on_policy import (
    check_run,
    free_memory,
    guarded,
    score_with,
    tell,
    trained_scores,
)

SERVERS = ("exact", "default", "deterministic", "train", "train-offload")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu for a trial")
    parser.add_argument(
        "--model", default="qwen3-0.6b", help="a shape of random_model.py, or a folder"
    )
    parser.add_argument("--server", choices=SERVERS, default="exact")
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--new-tokens", type=int, default=384, help="the longest sample")
    parser.add_argument("--seconds", type=float, default=280.0, help="no part starts later")
    parser.add_argument("--output", type=Path, default=Path("/tmp/true_on_policy"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    options.tiny = options.model == "tiny"
    return options


def arguments(options: argparse.Namespace, folder: Path, exact: bool) -> Any:
    from slime.config.parser import read_command_line
    from slime.config.resolve import resolve_defaults
    from slime.config.rules import Run

    words = ["--hf-checkpoint", folder, "--train-backend", "fsdp", "--rollout-backend", "sglang"]
    words += [
        "--colocate",
        "--no-offload-train",
        "--no-offload-rollout",
        "--train-dtype",
        "bfloat16",
    ]
    words += ["--actor-num-gpus-per-node", 1, "--rollout-batch-size", 32, "--num-rollout", 9]
    words += ["--n-samples-per-prompt", 1, "--rollout-temperature", 1.0]
    words += ["--no-skip-zero-advantage-groups", "--no-compile-layers", *sglang_flags(options)]
    words += ["--true-on-policy"] if exact else []
    args, problems = read_command_line([str(word) for word in words])
    problems += resolve_defaults(Run(args))
    assert not problems, problems
    return args


def sglang_flags(options: argparse.Namespace, memory: float = 0.4) -> list[object]:
    """The same for all servers. Without a compiler, these are those that start."""
    if options.device == "cpu":
        return ["--sglang-device", "cpu", "--sglang-max-total-tokens", 32768]
    backend = ["--sglang-attention-backend", "triton", "--sglang-disable-prefill-cuda-graph"]
    return [*backend, "--sglang-mem-fraction-static", memory]


def check_server(options: argparse.Namespace) -> None:
    from random_model import make_config, write_model

    from slime.engines.launch import EngineSettings, EngineSpec, start_engine

    folder = Path(options.model)
    if not folder.is_dir():
        folder = write_model(options.model, options.output / options.model)
        vocab = make_config(options.model).vocab_size
    else:
        from transformers import AutoConfig

        vocab = AutoConfig.from_pretrained(folder).vocab_size
    settings = EngineSettings.from_args(arguments(options, folder, options.server == "exact"))
    settings = replace(settings, deterministic=options.server == "deterministic")
    started = time.perf_counter()
    log = options.output / f"{options.server}.log"
    server = start_engine(settings, EngineSpec(0, str(folder)), log_path=log)
    try:
        server.wait_ready(240.0)
        loading = time.perf_counter() - started
        rounds = [generate(server.url, options, vocab, number) for number in range(2)]
    except Exception:
        print(server.log_tail()[-6000:], flush=True)
        raise
    finally:
        server.stop()
    samples, generating = rounds[-1]
    count = sum(len(sample.output_ids) for sample in samples)
    common = dict(model=folder.name, server=options.server, log_probs=count)
    speed = dict(loading=round(loading, 1), generating=round(generating, 2))
    tell(options, part="speed", **common, **speed, tokens_per_second=round(count / generating))
    for exact in (True, False):
        guarded(options, f"scores {exact}", compare, folder, samples, exact, common)
        free_memory()


def generate(
    url: str, options: argparse.Namespace, vocab: int, number: int
) -> tuple[list[Any], float]:
    """Samples of all requests at once, of which a third have the beginning of the prompt in common."""
    from slime.engines.handle import EngineHandle

    rng = random.Random(number)
    common = [rng.randrange(2, vocab) for _ in range(40)]
    prompts = [
        [rng.randrange(2, vocab) for _ in range(rng.randrange(1, 300))]
        for _ in range(options.requests)
    ]
    lengths = [rng.randrange(options.new_tokens // 8, options.new_tokens) for _ in prompts]
    engine = EngineHandle(url)

    async def one(i: int) -> Any:
        prompt = common + prompts[i] if i % 3 == 0 else prompts[i]
        params = {"max_new_tokens": lengths[i], "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        output = (await engine.generate(body))["meta_info"]["output_token_logprobs"]
        return SimpleNamespace(
            request=SimpleNamespace(input_ids=prompt),
            output_ids=[entry[1] for entry in output],
            output_logprobs=[entry[0] for entry in output],
        )

    async def every() -> list[Any]:
        return await asyncio.gather(*(one(i) for i in range(len(prompts))))

    from slime.utils.async_utils import run

    started = time.perf_counter()
    samples = run(every())
    return samples, time.perf_counter() - started


def compare(
    options: argparse.Namespace, folder: Path, samples: list[Any], exact: bool, common: Any
) -> None:
    from slime.backends.create import create_backend
    from slime.engines.process import free_port

    backend: Any = create_backend(
        arguments(options, folder, exact), "actor", 0, 1, "127.0.0.1", free_port(), 0
    )
    engine = [value for sample in samples for value in sample.output_logprobs]
    ways = {"packs of 8": lambda: score_with(backend, samples, 0, 8)}
    if exact:
        ways["packs of 21, shuffled"] = lambda: score_with(backend, samples, 1, 21)
        ways["training"] = lambda: trained_scores(backend, samples)
    for way, score in ways.items():
        gaps = [abs(a - b) for a, b in zip(score(), engine, strict=True)]
        result = dict(
            differ=sum(gap != 0 for gap in gaps), mean=sum(gaps) / len(gaps), largest=max(gaps)
        )
        tell(options, part="agreement", **common, trainer_in_mode=exact, way=way, **result)


def main() -> None:
    options = parse_options()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not options.server.startswith("train"):
        guarded(options, options.server, check_server)
        return
    stay = (
        [] if options.server == "train-offload" else ["--no-offload-train", "--no-offload-rollout"]
    )
    flags = [*stay, *sglang_flags(options, 0.3 if stay else 0.6)]
    check_run(options, "sglang", *flags, seconds=options.seconds)


if __name__ == "__main__":
    main()
