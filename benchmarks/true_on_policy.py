"""``--true-on-policy``: whether trainer and embedded engine agree to the bit, and what it costs.

    python benchmarks/true_on_policy.py --output /tmp/true                   # one H200, five minutes
    python benchmarks/true_on_policy.py --output /tmp/true --device cpu --tiny

Parts: the kernels alone (rows of other batches, prefill and decode, float64); samples of an engine
scored by a trainer in several packings and orders, with the mode and without; the seconds of a
training step with the mode and without; a run of three rollouts. A part that fails prints its
traceback and costs its own figures only. Each result is a line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]

STARTED = time.monotonic()
PARTS = ("kernels", "agreement", "train", "speed")
COUNTS = (1, 3, 64, 1000, 8192)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu for a trial")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a trial")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=280.0, help="no part starts later")
    parser.add_argument("--output", type=Path, default=Path("/tmp/true_on_policy"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def tell(options: argparse.Namespace, **result: Any) -> None:
    line = json.dumps({**result, "at": round(time.monotonic() - STARTED, 1)})
    print(line, flush=True)
    with (options.output / "true_on_policy.jsonl").open("a") as file:
        file.write(line + "\n")


def guarded(
    options: argparse.Namespace, name: str, work: Callable[..., None], *arguments: Any
) -> None:
    if time.monotonic() - STARTED > options.seconds:
        tell(options, part=name, left_out="the time is over")
        return
    try:
        work(options, *arguments)
    except Exception as error:
        traceback.print_exc()
        tell(options, part=name, error=f"{type(error).__name__}: {str(error)[:500]}")


# --- the kernels alone ---------------------------------------------------------------------------


def check_kernels(options: argparse.Namespace) -> None:
    for check in (check_products, check_rows, check_attention, check_scores, check_gradients):
        guarded(options, check.__name__, check)


def check_products(options: argparse.Namespace) -> None:
    import torch

    from slime.plugins.true_on_policy.functions import linear

    shapes = [(1024, 2048), (3072, 1024), (1024, 3072), (9728, 2560), (2560, 9728), (151936, 1024)]
    counts: tuple[int, ...] = COUNTS
    if options.tiny:
        shapes, counts = [(64, 96)], COUNTS[:3]
    for n, k in shapes:
        x = torch.randn(counts[-1], k, device=options.device, dtype=torch.bfloat16)
        w = torch.randn(n, k, device=options.device, dtype=torch.bfloat16) * k**-0.5
        whole = linear(x, w)
        wrong = []
        for count in counts:
            for start in {0, (counts[-1] - count) // 2, counts[-1] - count}:
                part = linear(x[start : start + count], w)
                wrong += [count] * (not torch.equal(part, whole[start : start + count]))
        exact = x[:64].double() @ w.double().t()
        worst = float(((whole[:64].double() - exact).abs() / (exact.abs() + 1)).max())
        library = float(((x[:64] @ w.t()).double() - exact).abs().max())
        result = dict(n=n, k=k, counts_that_differ=wrong, error=worst, library_error=library)
        if options.device == "cuda":
            flops = 2 * counts[-1] * n * k
            for name, product in (("", linear), ("library_", torch.nn.functional.linear)):
                result[f"{name}tflops"] = round(flops / seconds_of(product, x, w) / 1e12)
                result[f"{name}us_of_32_rows"] = round(seconds_of(product, x[:32], w) * 1e6)
        tell(options, part="product", **result)


def check_rows(options: argparse.Namespace) -> None:
    import torch

    from slime.plugins.true_on_policy.functions import rms_norm, rotate, swiglu

    make = lambda *size: torch.randn(*size, device=options.device, dtype=torch.bfloat16)  # noqa: E731
    count = 64 if options.tiny else 8192
    for width in (128, 1024, 2560):
        x, weight = make(count, width), make(width)
        whole = rms_norm(x, weight, 1e-6)
        parts = {
            n: torch.equal(rms_norm(x[7 : 7 + n], weight, 1e-6), whole[7 : 7 + n])
            for n in (1, 3, 33)
        }
        wide = x.double()
        exact = weight.double() * wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        error = float(((whole.double() - exact).abs() / (exact.abs() + 1e-3)).max())
        tell(options, part="norm", width=width, equal=parts, error=error)
    x, up = make(count, 3072), make(count, 3072)
    whole = swiglu(x, up)
    tell(
        options,
        part="swiglu",
        equal={
            n: torch.equal(swiglu(x[5 : 5 + n], up[5 : 5 + n]), whole[5 : 5 + n])
            for n in (1, 3, 33)
        },
    )
    heads, half = make(count, 16, 128), make(count, 64)
    cos = sin = torch.cat((half, half), -1)
    whole = rotate(heads, cos, sin)
    tell(
        options,
        part="rotate",
        equal={
            n: torch.equal(
                rotate(heads[5 : 5 + n], cos[5 : 5 + n], sin[5 : 5 + n]), whole[5 : 5 + n]
            )
            for n in (1, 3, 33)
        },
    )


def check_attention(options: argparse.Namespace) -> None:
    import torch

    from slime.plugins.true_on_policy.functions import attend

    device = options.device
    lengths = [70, 5, 33] if options.tiny else [1000, 64, 65, 1, 2047, 300]
    for heads, kv_heads, size in ((16, 8, 128), (32, 8, 128), (9, 3, 64), (16, 4, 64)):
        total = sum(lengths)
        q, k, v = (
            torch.randn(total, n, size, device=device, dtype=torch.bfloat16)
            for n in (heads, kv_heads, kv_heads)
        )
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        spans = torch.tensor([starts, lengths, starts, lengths], device=device)
        whole = attend(q, k, v, spans, (max(lengths), 0), size**-0.5)
        # the same tokens as steps of decode over slots, and the last part of each prompt
        room = max(lengths) + 64
        stores = [
            torch.full(
                (len(lengths) * room, kv_heads, size), float("nan"), device=device, dtype=q.dtype
            )
            for _ in "kv"
        ]
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            for store, source in zip(stores, (k, v), strict=True):
                store[i * room : i * room + length] = source[start : start + length]
        rows = [
            (i, position)
            for i, length in enumerate(lengths)
            for position in sorted({0, length // 3, length // 2, length - 1, max(length - 2, 0)})
        ]
        picked = torch.tensor([starts[i] + position for i, position in rows], device=device)
        columns = [(n, 1, i * room, position + 1) for n, (i, position) in enumerate(rows)]
        steps = torch.tensor(columns, device=device).t().contiguous()
        decoded = attend(q[picked], stores[0], stores[1], steps, (1, 0), size**-0.5)
        half = [length // 2 for length in lengths]
        ends = torch.tensor(
            [
                [s + h for s, h in zip(starts, half, strict=True)],
                [n - h for n, h in zip(lengths, half, strict=True)],
                [i * room for i in range(len(lengths))],
                lengths,
            ],
            device=device,
        )
        later = attend(q, stores[0], stores[1], ends, (max(lengths), 0), size**-0.5)
        chunks = all(
            torch.equal(later[s + h : s + n], whole[s + h : s + n])
            for s, h, n in zip(starts, half, lengths, strict=True)
        )
        start, length = starts[0], min(lengths[0], 300)
        exact = exact_attention(*(x[start : start + length] for x in (q, k, v)))
        tell(
            options,
            part="attention",
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            decode_is_prefill=torch.equal(decoded, whole[picked]),
            later_chunk_is_prefill=chunks,
            error=float((whole[start : start + length].double() - exact).abs().max()),
        )


def exact_attention(q: Any, k: Any, v: Any) -> Any:
    import torch

    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    later = torch.ones(q.shape[1], q.shape[1], device=q.device).triu(1).bool()
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def check_scores(options: argparse.Namespace) -> None:
    import torch

    from slime.plugins.true_on_policy.functions import score

    vocab, count = (512, 33) if options.tiny else (151936, 2048)
    logits = torch.randn(count, vocab, device=options.device, dtype=torch.bfloat16) * 4
    targets = torch.randint(vocab, (count,), device=options.device)
    for temperature in (1.0, 0.7):
        divisors = torch.full((count,), temperature, device=options.device)
        whole = score(logits, targets, divisors)
        equal = {}
        for n in (1, 3, 33):
            part = slice(0 if n == 33 else 11, (0 if n == 33 else 11) + n)
            found = score(logits[part].clone(), targets[part], divisors[part])
            equal[n] = all(torch.equal(a, b[part]) for a, b in zip(found, whole, strict=True))
        z = (logits[:64].float() / torch.tensor(temperature, device=options.device)).double()
        exact = z.log_softmax(-1).gather(1, targets[:64, None])[:, 0]
        entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)
        tell(
            options,
            part="scores",
            temperature=temperature,
            equal=equal,
            error=float((whole[0][:64] - exact).abs().max()),
            entropy_error=float((whole[2][:64] - entropy).abs().max()),
        )


def check_gradients(options: argparse.Namespace) -> None:
    """The gradients of the functions against those of float64."""
    import torch

    from slime.plugins.true_on_policy import functions

    device = options.device
    torch.manual_seed(1)
    make = lambda *size: torch.randn(*size, device=device, dtype=torch.bfloat16)  # noqa: E731
    n, size = 200, 64
    starts = torch.tensor([0, 120, n], device=device, dtype=torch.int32)
    spans = torch.stack([part for _ in "qk" for part in (starts[:-1], starts.diff())]).long()
    half = make(n, size // 2)
    turn = torch.cat((half, half), -1)
    cases: dict[str, tuple[Callable[..., Any], list[Any]]] = {
        "linear": (functions.linear, [make(n, 128), make(96, 128), make(96)]),
        "rms_norm": (lambda x, w: functions.rms_norm(x, w, 1e-6), [make(n, 128), make(128)]),
        "rotate": (
            lambda x: functions.rotate(x, turn.to(x.device), turn.to(x.device)),
            [make(n, 4, size)],
        ),
        "swiglu": (functions.swiglu, [make(n, 256), make(n, 256)]),
        "attention": (
            lambda q, k, v: functions.attend(
                q,
                k,
                v,
                spans.to(q.device),
                (120, 120),
                size**-0.5,
                (starts.to(q.device), starts.to(q.device)),
            ),
            [make(n, 4, size), make(n, 2, size), make(n, 2, size)],
        ),
    }
    for name, (function, values) in cases.items():
        grads = []
        for where in (device, "cpu"):
            inputs = [x.detach().to(where).requires_grad_() for x in values]
            out = function(*inputs)
            weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
            grads.append(torch.autograd.grad((out * weights).sum(), inputs))
        errors = [
            round(float((a.cpu().double() - b.double()).norm() / b.double().norm()), 5)
            for a, b in zip(*grads, strict=True)
        ]
        tell(options, part="gradient", of=name, relative_errors=errors)


def seconds_of(work: Callable[..., Any], *arguments: Any, times: int = 10) -> float:
    import torch

    for _ in range(3):
        work(*arguments)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work(*arguments)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times


# --- engine and trainer in one process -------------------------------------------------------------


def check_agreement(options: argparse.Namespace) -> None:
    shapes = ["tiny", "tiny-llama"] if options.tiny else ["qwen3-0.6b", "llama-8-layers"]
    for shape in shapes:
        for exact in (True, False) if shape == shapes[0] else (True,):
            guarded(options, f"agreement {shape}", agreement, shape, exact)
            free_memory()


def free_memory() -> None:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def agreement(options: argparse.Namespace, shape: str, exact: bool) -> None:
    from random_model import make_config, write_model

    from slime.backends.create import create_backend
    from slime.config.parser import read_command_line
    from slime.config.resolve import resolve_defaults
    from slime.config.rules import Run
    from slime.engines.process import free_port
    from slime.plugins.embedded.loading import EngineOptions, load_engine

    folder = write_model(shape, options.output / shape)
    started = time.perf_counter()
    loaded = load_engine(
        EngineOptions(
            str(folder),
            "bfloat16",
            options.device,
            max_running_requests=32,
            max_total_tokens=4096 if options.tiny else 49152,
            kernels="exact" if exact else None,
        )
    )
    loading = time.perf_counter() - started
    started = time.perf_counter()
    sequences = generate(loaded, make_config(shape).vocab_size, options.tiny)
    generating = time.perf_counter() - started
    words = [
        "--hf-checkpoint",
        str(folder),
        "--train-backend",
        "fsdp",
        "--rollout-backend",
        "embedded",
        "--colocate",
        "--actor-num-gpus-per-node",
        "1",
        "--train-dtype",
        "bfloat16",
        "--rollout-batch-size",
        "32",
        "--n-samples-per-prompt",
        "1",
        "--num-rollout",
        "9",
        "--rollout-temperature",
        str(TEMPERATURE),
        "--no-skip-zero-advantage-groups",
        *(["--true-on-policy"] if exact else []),
    ]
    args, problems = read_command_line(words)
    problems += resolve_defaults(Run(args))
    assert not problems, problems
    backend: Any = create_backend(args, "actor", 0, 1, "127.0.0.1", free_port(), 0)
    scored = [
        score_with(backend, sequences, order, size) for order, size in ((0, 4), (1, 11), (2, 32))
    ]
    trained = trained_scores(backend, sequences)
    engine = [value for sequence in sequences for value in sequence.output_logprobs]
    result: dict[str, Any] = {}
    for name, values in [
        *zip(("packs of 4", "of 11", "of 32"), scored, strict=True),
        ("training", trained),
    ]:
        gaps = [abs(a - b) for a, b in zip(values, engine, strict=True)]
        result[name] = {"differ": sum(gap != 0 for gap in gaps), "largest": max(gaps)}
    tell(
        options,
        part="agreement",
        shape=shape,
        true_on_policy=exact,
        log_probs=len(engine),
        **result,
        mean_log_prob=round(sum(engine) / len(engine), 3),
        loading=round(loading, 1),
        generating=round(generating, 1),
        tokens_per_second=round(len(engine) / generating),
    )


TEMPERATURE = 0.8


def generate(loaded: Any, vocab: int, tiny: bool) -> list[Any]:
    """32 samples of mixed lengths, some with a prompt in common; they start at different steps."""
    from slime.plugins.embedded.protocol import GenerateRequest, SamplingParams
    from slime.plugins.embedded.sequence import Sequence

    rng = random.Random(3)
    scale = 1 if tiny else 5
    common = [rng.randrange(2, vocab) for _ in range(11 * scale)]
    waiting = []
    for i in range(32):
        own = [rng.randrange(2, vocab) for _ in range(rng.randrange(1, 24 * scale))]
        prompt = common if i % 4 == 0 else common + own if i % 4 == 1 else own
        most = rng.randrange(4, 24 * scale)
        params = SamplingParams(max_new_tokens=most, temperature=TEMPERATURE, ignore_eos=True)
        request = GenerateRequest(f"r{i}", prompt, params, return_logprob=True)
        request.logprob_start_len = -1
        waiting.append(Sequence(request, 0, i))
    sequences = list(waiting)
    scheduler = loaded.engine.scheduler
    steps = 0
    while True:
        arriving = 12 if steps == 0 else steps % 2
        for sequence in waiting[:arriving]:
            scheduler.add(sequence)
        del waiting[:arriving]
        plan = scheduler.plan()
        if plan is None and not waiting:
            return sequences
        if plan is not None:
            scheduler.commit(plan, loaded.engine.compute(plan))
        steps += 1


def batch_of(sequences: list[Any], order: list[int], size: int) -> Any:
    import torch

    from slime.data.fields import RankBatch

    picked = [sequences[i] for i in order]
    tokens = [torch.tensor(list(s.request.input_ids) + list(s.output_ids)) for s in picked]
    responses = [len(s.output_ids) for s in picked]
    n = len(picked)
    packs = [list(range(i, min(i + size, n))) for i in range(0, n, size)]
    return RankBatch(
        dict(
            rollout_id=0,
            tokens=tokens,
            total_lengths=[len(t) for t in tokens],
            response_lengths=responses,
            loss_masks=[torch.ones(r, dtype=torch.int32) for r in responses],
            rewards=[1.0, -1.0] * (n // 2),
            raw_reward=[0.0] * n,
            truncated=[0] * n,
            sample_indices=list(range(n)),
            group_indices=[0] * n,
            rollout_ids=list(range(n)),
            rollout_mask_sums=[float(r) for r in responses],
            rollout_log_probs=[torch.tensor(s.output_logprobs) for s in picked],
            micro_batch_indices=packs,
            num_microbatches=[len(packs)],
            global_batch_sizes=[n],
            global_token_counts=[float(sum(responses))],
        )
    )


def in_order(found: list[Any], order: list[int]) -> list[float]:
    by_sample = dict(zip(order, found, strict=True))
    return [value for i in range(len(order)) for value in by_sample[i].tolist()]


def score_with(backend: Any, sequences: list[Any], seed: int, size: int) -> list[float]:
    order = list(range(len(sequences)))
    if seed:
        random.Random(seed).shuffle(order)
    return in_order(backend.log_probs(batch_of(sequences, order, size))["log_probs"], order)


def trained_scores(backend: Any, sequences: list[Any]) -> list[float]:
    """The log-probs of the passes that have a gradient."""
    from slime.backends.advantages import AdvantageSettings, compute_advantages
    from slime.backends.micro_batches import ResponseValues

    order = list(reversed(range(len(sequences))))
    batch = batch_of(sequences, order, 7)
    compute_advantages(AdvantageSettings.from_args(backend.args), batch, backend.reduce)
    values = ResponseValues(batch, ["log_probs"], backend.device)
    backend.optimizer.zero_grad()
    backend.accumulate(batch, 0, values)
    return in_order(values.by_sample()["log_probs"], order)


# --- runs in processes of their own ----------------------------------------------------------------


def run(options: argparse.Namespace, *words: object, seconds: float = 150.0) -> tuple[int, str]:
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=options.output,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return 124, said.decode() if isinstance(said, bytes) else said
    return done.returncode, done.stdout


def check_speed(options: argparse.Namespace) -> None:
    for shape in ["tiny"] if options.tiny else ["qwen3-0.6b", "qwen3-4b"]:
        guarded(options, f"speed {shape}", speed, shape)


def speed(options: argparse.Namespace, shape: str) -> None:
    seconds = {}
    for exact in (True, False):
        tiny = ["--tiny", "--device", "cpu"] if options.tiny else []
        mode = ["--true-on-policy", "--train-dtype", "bfloat16"] if exact else []
        code, said = run(
            options,
            CHECKOUT / "benchmarks/train_mfu.py",
            "--shape",
            shape,
            "--steps",
            4,
            *tiny,
            *("--model", options.output / shape, "--", "--rollout-backend", "embedded", *mode),
        )
        if code:
            print(said[-4000:], flush=True)
            tell(options, part="speed", shape=shape, true_on_policy=exact, exit_code=code)
            continue
        found = json.loads(said.strip().splitlines()[-1])
        names = ("train_seconds", "log_probs_seconds", "peak_gib", "warmup_seconds")
        kept = {name: found[name] for name in names}
        seconds[exact] = kept
        tell(options, part="speed", shape=shape, true_on_policy=exact, **kept)
    if len(seconds) == 2:
        ratios = {
            name: round(min(seconds[True][name]) / min(seconds[False][name]), 3)
            for name in ("train_seconds", "log_probs_seconds")
        }
        tell(options, part="speed", shape=shape, times_slower=ratios)


def check_run(
    options: argparse.Namespace, backend: str = "embedded", *more: object, seconds: float = 150.0
) -> None:
    """Three rollouts in one process: the importance ratios of each first step are exactly 1."""
    from random_model import write_model

    from slime.plugins.tools.commands.make_data import make_products

    shape = "tiny" if options.tiny else "qwen3-0.6b"
    folder = write_model(shape, options.output / shape)
    data, _ = make_products(options.output / "data", seed=1)
    name = f"run-{int(time.time())}"
    code, said = run(
        options,
        "-m",
        "slime.cli.main",
        "train",
        "--inline",
        "--hf-checkpoint",
        folder,
        "--prompt-data",
        data,
        "--rm-type",
        "random",
        "--num-rollout",
        3,
        "--rollout-batch-size",
        8,
        "--n-samples-per-prompt",
        4,
        "--rollout-max-response-len",
        16 if options.tiny else 64,
        "--apply-chat-template",
        "--lr",
        1e-5,
        "--use-dynamic-batch-size",
        "--max-tokens-per-gpu",
        2048,
        "--train-backend",
        "fsdp",
        "--rollout-backend",
        backend,
        "--train-dtype",
        "bfloat16",
        "--colocate",
        *(more or ("--no-offload-train", "--no-offload-rollout")),
        "--actor-num-gpus-per-node",
        1,
        "--true-on-policy",
        "--output-dir",
        options.output,
        "--run-name",
        name,
        seconds=seconds,
    )
    files = list((options.output / name).rglob("metrics.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    gaps = [
        line["train/train_rollout_logprob_abs_diff_max"]
        for line in lines
        if "train/train_rollout_logprob_abs_diff_max" in line
    ]
    if code or not gaps:
        print(said[-4000:], flush=True)
    exact = len(gaps) >= 3 and not any(gaps)
    result = dict(exit_code=code, largest_gaps=gaps, ratios_are_1=exact)
    tell(options, part="train", backend=backend, flags=more, shape=shape, **result)


WORK = {
    "kernels": check_kernels,
    "agreement": check_agreement,
    "train": check_run,
    "speed": check_speed,
}


def main() -> None:
    options = parse_options()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for part in options.parts:
        guarded(options, part, WORK[part])


if __name__ == "__main__":
    main()
