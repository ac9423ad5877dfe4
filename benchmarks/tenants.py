"""Several adapters over one base: their memory and tokens/s, and tenants of one Tinker server.

    python benchmarks/tenants.py adapters --output DIR
    python benchmarks/tenants.py server --output DIR -- --rollout-backend sglang

``adapters`` trains 1, 4 and 16 adapters of rank 16 on one base, in turns as ``slime serve`` does: each gets
a request of ``--tokens`` tokens and a step of its optimizer. ``server`` starts ``slime serve``, and gives
one tenant, then four at a time, rounds of the RL loop over HTTP: sample a group of answers, train on them,
step, save the weights for the next samples. Words after ``--`` go to ``slime serve``. At the end, no
tenant may see what the first one saved. The model has random weights in a public shape. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import train_mfu

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]
GIB = 2**30
COUNTS = (1, 4, 16)
READY = re.compile(r"ready: TINKER_BASE_URL=(\S+)")


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("adapters", "server"))
    parser.add_argument("--shape", default="qwen3-4b", help="of benchmarks/random_model.py")
    parser.add_argument("--model", type=Path, help="folder of the random model; made where absent")
    parser.add_argument("--tokens", type=int, default=16384, help="of a request that trains")
    parser.add_argument("--sample-tokens", type=int, default=1024)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4, help="counted ones, after one more")
    parser.add_argument("--answers", type=int, default=16, help="in a group of a tenant")
    parser.add_argument("--output", type=Path, required=True, help="folder for the JSON and logs")
    parser.add_argument("--device", default="cuda", help="cpu for a trial of the script")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, for a trial")
    options, rest = train_mfu.parse_words(parser)
    if options.tiny:
        options.shape, options.tokens, options.sample_tokens = "tiny", 256, 64
        options.prompt_tokens, options.answers, options.rounds = 16, 4, 2
    options.model = options.model or Path(tempfile.gettempdir()) / f"random-{options.shape}"
    options.output = options.output.resolve()
    return options, rest


def adapters(options: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """Rounds in which each of N adapters gets a request and a step."""
    import torch
    from random_model import make_config

    from slime.backends import primitives
    from slime.backends.create import create_backend
    from slime.plugins.serve.adapters import Adapters
    from slime.types import AdamSettings

    options.backend, options.micro_batches = "fsdp", 1
    options.recompute = options.no_compile = False
    flags = ["--lora-rank", "16", "--lora-sync", "merged", *rest]
    args = train_mfu.make_args(options, flags, 1)
    backend: Any = create_backend(args, "actor", 0, 1, "127.0.0.1", train_mfu._free_port(), 0)
    batch = train_mfu.make_batch(options, make_config(options.shape).vocab_size, 0, 1)
    batch["advantages"] = [torch.ones(n) for n in batch["response_lengths"]]
    on_cuda = options.device == "cuda"
    held = Adapters()
    rows = []
    for count in COUNTS:
        for place in range(len(held.apart) + (held.current is not None), count):
            held.create(backend, str(place), 16, place)
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()

        def one_round(count: int = count) -> None:
            for place in range(count):
                held.use(backend, str(place))
                primitives.forward_backward(backend, batch, "importance_sampling", {})
                held.step(backend, str(place), AdamSettings(lr=1e-4))

        seconds = [train_mfu.timed(one_round, backend.device) for _ in range(options.rounds + 1)][
            1:
        ]
        per_adapter = statistics.median(seconds) / count
        rows.append(
            {
                "adapters": count,
                "seconds_per_request_and_step": round(per_adapter, 4),
                "tokens_per_second": round(options.tokens / per_adapter),
                "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if on_cuda else None,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    one = held._taken(backend)
    size = sum(x.numel() * 4 for x in one.values) * 3 / GIB
    return {"rows": rows, "adapter_with_moments_gib": round(size, 4)}


class Tenant:
    """One tenant's program, which owns its loop."""

    def __init__(self, http: Any, key: str, model: str) -> None:
        self.http, self.base, self.headers = http, model, {"X-API-Key": key}
        self.number, self.tokens = 0, 0

    async def ask(self, path: str, body: Any) -> Any:
        kind = {"data": body} if isinstance(body, bytes) else {"json": body}
        more = {"Content-Type": "application/x-protobuf"} if isinstance(body, bytes) else {}
        headers = {**self.headers, **more}
        async with self.http.post(f"/api/v1{path}", headers=headers, **kind) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{path}: {answer.status} {(await answer.text())[:300]}")
            is_json = answer.content_type == "application/json"
            return await (answer.json() if is_json else answer.read())

    async def do(self, path: str, body: Any) -> Any:
        made = await self.ask(path, body)
        while True:  # the server answers "try again" when a result takes long
            found = await self.ask("/retrieve_future", {"request_id": made["request_id"]})
            if not (isinstance(found, dict) and found.get("type") == "try_again"):
                return found

    async def start(self) -> None:
        made = await self.ask("/create_session", {"tags": [], "user_metadata": None})
        body = {"session_id": made["session_id"], "model_seq_id": 0, "base_model": self.base}
        body["lora_config"] = {"rank": 16, "seed": 1}
        self.model = (await self.do("/create_model", body))["model_id"]

    def next(self) -> int:
        self.number += 1
        return self.number

    async def round(self, options: argparse.Namespace, prompt: list[int]) -> dict[str, float]:
        from slime.plugins.serve.messages import CLASSES

        saved = {"model_id": self.model, "seq_id": self.next()}
        began = time.perf_counter()
        path = "/save_weights_for_sampler"
        named = await self.do(path, {**saved, "sampling_session_seq_id": self.number})
        weights = time.perf_counter()
        new = options.sample_tokens - options.prompt_tokens
        params = {"max_tokens": new, "temperature": 1.0}
        body = {"sampling_session_id": named["sampling_session_id"], "seq_id": 0}
        text = {"chunks": [{"tokens": prompt, "type": "encoded_text"}]}
        body |= {"prompt": text, "num_samples": options.answers, "sampling_params": params}
        answers = samples_of(await self.do("/asample", body))
        sampled = time.perf_counter()
        asked = CLASSES["ForwardBackwardRequest"](
            model_id=self.model,
            seq_id=self.next(),
            data=[datum(prompt, *answer, i) for i, answer in enumerate(answers)],
            loss_fn="importance_sampling",
        )
        await self.do("/forward_backward", asked.SerializeToString())
        body = {"model_id": self.model, "seq_id": self.next()}
        await self.do("/optim_step", {**body, "adam_params": {"learning_rate": 1e-4}})
        ended = time.perf_counter()
        self.tokens += sum(len(tokens) for tokens, _ in answers)
        return {"save": weights - began, "sample": sampled - weights, "train": ended - sampled}


def samples_of(answer: bytes) -> list[tuple[list[int], list[float]]]:
    """The tokens and log-probs of the sequences in a ``SampleResponse``."""
    import numpy as np

    from slime.plugins.serve.messages import CLASSES

    return [
        (np.frombuffer(one.tokens, "<i4").tolist(), np.frombuffer(one.logprobs, "<f4").tolist())
        for one in CLASSES["SampleResponse"].FromString(answer).sequences
    ]


def datum(
    prompt: list[int], tokens: list[int], log_probs: list[float], place: int
) -> dict[str, Any]:
    """A datum whose advantages are 0 for the prompt."""
    import numpy as np

    def tensor(values: list[Any], kind: str) -> dict[str, Any]:
        dense = np.array(values, kind).tobytes()
        return {"dense": dense, "dtype": 2 if kind == "<i8" else 1, "shape": [len(values)]}

    whole = [*prompt, *tokens]
    before = [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": tensor(whole[1:], "<i8"),
        "logprobs": tensor([*before, *log_probs], "<f4"),
        "advantages": tensor([*before, *[1.0 if place % 2 else -1.0] * len(tokens)], "<f4"),
    }
    text = {"encoded_text": {"tokens": np.array(whole[:-1], "<i4").tobytes()}}
    entries = [{"key": name, "value": value} for name, value in inputs.items()]
    return {"model_input": [text], "loss_fn_inputs": entries}


async def loops(
    options: argparse.Namespace, url: str, keys: list[str], prompt: list[int]
) -> dict[str, Any]:
    """Rounds of as many tenants as there are keys, at the same time."""
    import aiohttp

    limit = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, timeout=limit, read_bufsize=2**20) as http:
        tenants = [Tenant(http, key, str(options.model.resolve())) for key in keys]
        for tenant in tenants:
            await tenant.start()
        await asyncio.gather(*(one.round(options, prompt) for one in tenants))
        for tenant in tenants:
            tenant.tokens = 0
        started = time.perf_counter()
        rounds: list[dict[str, float]] = []
        for _ in range(options.rounds):
            rounds += await asyncio.gather(*(one.round(options, prompt) for one in tenants))
        seconds = time.perf_counter() - started
        trained = sum(one.tokens for one in tenants)
        parts = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        leaks = 0
        for other in tenants[1:]:
            try:
                await other.ask("/get_info", {"model_id": tenants[0].model})
                leaks += 1
            except RuntimeError as error:
                assert " 404 " in str(error), error
    return {
        "tenants": len(keys),
        "seconds_per_round": round(seconds / options.rounds, 3),
        "answer_tokens_per_second": round(trained / seconds),
        "median_seconds": {name: round(value, 3) for name, value in parts.items()},
        "seen_by_others": leaks,
    }


def server(options: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """``slime serve``, one tenant and then four."""
    from random_model import make_config

    names = [f"tenant-{place}" for place in range(4)]
    keys = options.output / "keys.json"
    keys.write_text(json.dumps({name: f"tml-{name}" for name in names}))
    command = [sys.executable, "-m", "slime.cli.main", "serve", "--model", str(options.model)]
    command += ["--state", str(options.output / "state"), "--port", "0", "--keys", str(keys), *rest]
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
    started = time.perf_counter()
    log = (options.output / "server.log").open("w")
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        url = _address(child)
        ready = round(time.perf_counter() - started, 1)
        prompt = [
            5 + i % (make_config(options.shape).vocab_size // 2)
            for i in range(options.prompt_tokens)
        ]
        rows = []
        for count in (1, 4):
            rows.append(
                asyncio.run(loops(options, url, [f"tml-{x}" for x in names[:count]], prompt))
            )
            print(json.dumps(rows[-1]), flush=True)
        return {"ready_seconds": ready, "rows": rows, "gpu_mib": _memory()}
    finally:
        child.terminate()
        child.wait(60)


def _address(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    for line in child.stdout:
        print(line.rstrip(), flush=True)
        if found := READY.search(line):
            return found[1]
    raise SystemExit(f"slime serve ended with {child.wait()}: see server.log")


def _memory() -> list[int]:
    """MiB in use on each GPU; none where there is no GPU."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return [
            int(x) for x in subprocess.run(words, capture_output=True, text=True).stdout.split()
        ]
    except OSError:
        return []


def main() -> None:
    options, rest = parse_options()
    options.output.mkdir(parents=True, exist_ok=True)
    from random_model import write_model

    if not (options.model / "config.json").is_file():
        write_model(options.shape, options.model)
    measured = {"adapters": adapters, "server": server}[options.part](options, rest)
    result = {"benchmark": "tenants", "part": options.part, "shape": options.shape, "flags": rest}
    result |= {"tokens": options.tokens, "answers": options.answers, **measured}
    line = json.dumps(result)
    (options.output / f"tenants_{options.part}.json").write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    train_mfu._leave()


if __name__ == "__main__":
    main()
