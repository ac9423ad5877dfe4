"""Model FLOPs utilisation of a training step and of a log-prob pass, and the memory that they take.

    python benchmarks/train_mfu.py --shape qwen3-4b
    torchrun --nproc-per-node 4 benchmarks/train_mfu.py --shape qwen3-4b
    torchrun --nproc-per-node 4 benchmarks/train_mfu.py --backend megatron -- --tensor-model-parallel-size 2
    torchrun --nproc-per-node 2 benchmarks/train_mfu.py --recompute --tokens 131072 --sample-tokens 131072 \
        --warmup-tokens 8192 -- --context-parallel-size 2 --context-parallel-kind ulysses

A step is forward, backward and optimizer over ``--micro-batches`` packs of ``--tokens`` tokens a
data-parallel rank (its context-parallel ranks divide them):
samples of unequal length, of which the response alone is scored, with the loss of GRPO. Utilisation
is the model's FLOPs (no recomputation, padding or unscored row counts; causal attention counts
half) over the step's seconds, over the rate at which this GPU multiplies large bf16 matrices,
measured first. Words after ``--`` are flags of train.py. The last line is JSON. Lines on stderr say when each
part ended and what it measured, so that a run that is ended early says how far it came.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.data.fields import RankBatch

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]
GIB = 2**30
STARTED = time.perf_counter()


def progress(what: str) -> None:
    """Write a line of the first rank to stderr, with the seconds since the script started."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{time.perf_counter() - STARTED:7.1f} s: {what}", file=sys.stderr, flush=True)


def parse_words(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """The options of a script, and the words after ``--``."""
    own = sys.argv[1:]
    rest = own[own.index("--") + 1 :] if "--" in own else []
    return parser.parse_args(own[: own.index("--")] if "--" in own else own), rest


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-4b", help="of benchmarks/random_model.py")
    parser.add_argument("--model", type=Path, help="folder of the random model; made where absent")
    parser.add_argument("--backend", choices=("fsdp", "megatron"), default="fsdp")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--sample-tokens", type=int, default=1024, help="mean length of a sample")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="per step and data-parallel rank"
    )
    parser.add_argument("--steps", type=int, default=5, help="counted steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before, which compile")
    parser.add_argument(
        "--warmup-tokens",
        type=int,
        help="of a micro-batch of the first of these steps, twice as many in the second and so on; "
        "default: --tokens",
    )
    parser.add_argument("--recompute", action="store_true", help="recompute activations")
    parser.add_argument(
        "--no-compile", action="store_true", help="layers as transformers runs them"
    )
    parser.add_argument(
        "--no-checkpoint",
        action="store_true",
        help="FSDP's ranks make up their own shards: no files, no CPU memory",
    )
    parser.add_argument(
        "--profile", action="store_true", help="also write a table of one step by kernel"
    )
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument("--name", help="of the files in it")
    parser.add_argument("--device", default="cuda", help="cpu for a trial of the script")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, for a trial")
    options, rest = parse_words(parser)
    if options.tiny:
        tiny = {"a3b": "tiny-experts", "gpt-oss": "tiny-gpt-oss", "qwen3.5": "tiny-qwen3.5"}
        options.shape = next(
            (small for part, small in tiny.items() if part in options.shape), "tiny"
        )
        options.tokens, options.sample_tokens, options.prompt_tokens = 256, 64, 16
    if min(options.tokens, options.sample_tokens) < options.prompt_tokens + 16:
        parser.error("a sample is shorter than its prompt and 16 tokens")
    if options.no_checkpoint and (
        options.backend != "fsdp" or int(os.environ.get("WORLD_SIZE", 1)) == 1
    ):
        parser.error("--no-checkpoint is for several ranks of FSDP")
    kind = "config" if options.no_checkpoint else "random"
    options.model = options.model or Path("/tmp") / f"{kind}-{options.shape}"
    return options, rest


def make_args(options: argparse.Namespace, rest: list[str], world: int) -> Any:
    """Flags as train.py would have them; what only a whole run needs is not asked for."""
    from slime.config.parser import read_command_line
    from slime.config.resolve import resolve_defaults
    from slime.config.rules import Run

    samples = options.micro_batches * max(options.tokens // options.sample_tokens, 1) * world
    on_cuda = options.device == "cuda"
    words = [
        *("--hf-checkpoint", str(options.model), "--train-backend", options.backend, "--colocate"),
        *(
            "--actor-num-gpus-per-node",
            str(world),
            "--train-dtype",
            "bfloat16" if on_cuda else "float32",
        ),
        *(
            "--rollout-batch-size",
            str(samples),
            "--n-samples-per-prompt",
            "1",
            "--num-rollout",
            "1000",
        ),
        *("--lr", "1e-6", "--no-skip-zero-advantage-groups", "--no-deterministic"),
        *(["--gradient-checkpointing"] if options.recompute else []),
        *(["--no-compile-layers"] if options.no_compile else []),
        *rest,
    ]
    args, problems = read_command_line(words)
    problems += resolve_defaults(Run(args))
    if problems:
        raise SystemExit("\n".join(problems))
    return args


def build_without_checkpoint() -> None:
    """Let ranks of FSDP build a model without values, and fill their shards with random ones where
    they are.

    The check of the packed model needs values before the model is sharded, and is left out.
    """
    import torch

    from slime.backends.collectives import local
    from slime.backends.fsdp import model as fsdp

    read: Any = fsdp.read_checkpoint

    @torch.no_grad()
    def fill(scorer: Any, whole: dict[str, Any], device: Any) -> None:
        config = scorer.hf.config.get_text_config()
        for parameter in scorer.parameters():
            part = local(parameter)
            part.fill_(1.0) if parameter.dim() == 1 else part.normal_(0.0, config.initializer_range)
        for module in scorer.modules():
            if module._buffers:  # the frequencies of positions
                for name, buffer in type(module)(config).named_buffers(recurse=False):
                    module._buffers[name].copy_(buffer)

    changes: dict[str, Any] = {
        "read_checkpoint": lambda args, empty=False: read(args, empty=True),
        "_check": lambda *_: None,
        "distribute": fill,
    }
    for name, function in changes.items():
        setattr(fsdp, name, function)


def sample_lengths(rng: random.Random, tokens: int, mean: int, prompt: int) -> list[int]:
    """Of a micro-batch of exactly ``tokens``. Each sample has the prompt and at least 16 tokens of
    response.
    """
    count = max(tokens // mean, 1)
    spread = mean // 2 - prompt // 2
    lengths = sorted(mean + rng.randint(-spread, spread) for _ in range(count))
    left = tokens - sum(lengths)
    for i in range(count):  # from the shortest, so that longer ones give what shorter ones cannot
        change = max(left // (count - i), prompt + 16 - lengths[i])
        lengths[i] += change
        left -= change
    rng.shuffle(lengths)
    return lengths


def make_batch(options: argparse.Namespace, vocab: int, rank: int, data_parallel: int) -> RankBatch:
    """One optimizer step of a data-parallel rank: each micro-batch exactly ``--tokens`` long."""
    import torch

    from slime.data.fields import RankBatch

    rng = random.Random(rank)
    lengths: list[int] = []
    for _ in range(options.micro_batches):
        lengths += sample_lengths(rng, options.tokens, options.sample_tokens, options.prompt_tokens)
    count = len(lengths) // options.micro_batches
    prompt = options.prompt_tokens
    responses = [length - prompt for length in lengths]
    generator = torch.Generator().manual_seed(rank)
    n = len(lengths)
    entries = dict(
        rollout_id=0,
        tokens=[torch.randint(vocab, (length,), generator=generator) for length in lengths],
        total_lengths=lengths,
        response_lengths=responses,
        loss_masks=[torch.ones(r, dtype=torch.int32) for r in responses],
        rewards=[rng.choice([-1.0, 1.0]) for _ in range(n)],
        raw_reward=[0.0] * n,
        truncated=[0] * n,
        sample_indices=list(range(rank * n, rank * n + n)),
        group_indices=list(range(rank * n, rank * n + n)),
        rollout_ids=list(range(rank * n, rank * n + n)),
        rollout_mask_sums=[float(r) for r in responses],
        rollout_log_probs=[torch.full((r,), -12.0) for r in responses],
        micro_batch_indices=[
            list(range(i * count, (i + 1) * count)) for i in range(options.micro_batches)
        ],
        num_microbatches=[options.micro_batches],
        global_batch_sizes=[n * data_parallel],
        global_token_counts=[float(sum(responses) * data_parallel)],
    )
    return RankBatch(entries)


def forward_flops(config: Any, batch: dict[str, Any]) -> float:
    """Of all samples: layers and causal attention for every token, the head for scored rows."""
    from slime.data.balance import ModelShape
    from slime.data.balance import forward_flops as of_layers

    if config.model_type not in ("qwen3", "qwen3_moe"):
        return forward_flops_of_matrices(config, batch)
    given = dict(
        swiglu=True,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        num_experts=getattr(config, "num_experts", None),
        moe_ffn_hidden_size=getattr(config, "moe_intermediate_size", None),
        moe_router_topk=getattr(config, "num_experts_per_tok", 1),
    )
    shape = ModelShape.from_megatron(given)
    head = 2.0 * config.vocab_size * config.hidden_size * sum(batch["response_lengths"])
    return sum(of_layers(shape, length) for length in batch["total_lengths"]) + head


def forward_flops_of_matrices(config: Any, batch: dict[str, Any]) -> float:
    """Of other families: two per token and element of each matrix that a token passes, and causal
    attention.

    Tensors with three dimensions hold all experts, of which a token takes ``num_experts_per_tok``.
    Convolutions and the recurrence of gated delta nets are not counted, so the utilisation of
    models that have them is a lower bound.
    """
    from random_model import checkpoint_shapes

    heads = config.num_attention_heads * config.head_dim
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    elements = 0.0
    for name, shape in checkpoint_shapes(config).items():
        if "embed_tokens" in name or "lm_head" in name or "conv1d" in name or len(shape) < 2:
            continue
        is_bias = name.endswith("_bias")
        taken = (
            0.0 if is_bias else config.num_experts_per_tok / shape[0] if len(shape) == 3 else 1.0
        )
        elements += taken * math.prod(shape)

    def attention(length: int) -> float:
        pairs = {"full_attention": length * length / 2}
        window = min(getattr(config, "sliding_window", None) or length, length)
        pairs["sliding_attention"] = window * length - window * window / 2
        return sum(4.0 * heads * pairs.get(kind, 0.0) for kind in kinds)

    lengths = batch["total_lengths"]
    head = 2.0 * config.vocab_size * config.hidden_size * sum(batch["response_lengths"])
    return 2.0 * elements * sum(lengths) + sum(map(attention, lengths)) + head


def matmul_rate(device: Any) -> float:
    """FLOP/s of a large matrix product on random data, bf16 on CUDA."""
    import torch

    on_cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_cuda else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    seconds = timed(lambda: [a @ b for _ in range(10)], device)
    return 10 * 2 * size**3 / seconds


def timed(work: Any, device: Any) -> float:
    """Wall seconds until the device has done it."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def expected_memory(
    backend: Any, config: Any, options: argparse.Namespace, rest: list[str]
) -> dict[str, float]:
    """GiB that must be there on this rank: weights, gradients and optimizer, and what the backward
    pass of dense layers reads in bf16 (their input, q, k and v before and after norm and rotation,
    attention's output, the middle, gate and up); with recomputation the inputs of the layers."""
    import torch

    layout = getattr(backend, "layout", None)  # Megatron's
    if layout is None:
        parameters = sum(
            (p.to_local() if hasattr(p, "to_local") else p).numel()
            for _, p in backend.named_parameters
        )
        master, moments = (
            2.0 if backend.args.bf16_master_weights else 4.0,
            2.0 if backend.args.optimizer_8bit else 8.0,
        )
        sizes = {
            "weights": master * parameters,
            "gradients": master * parameters,
            "optimizer": moments * parameters,
        }
    # bf16 weights; float32 masters and moments, over the ranks with equal ones with the distributed
    # optimizer
    else:
        own = [p for chunk in backend.chunks for p in chunk.parameters()]
        experts = sum(p.numel() for p in own if not getattr(p, "allreduce", True))
        dense = sum(p.numel() for p in own) - experts
        equal, equal_experts = (
            layout.dp * layout.cp,
            layout.world_size // (layout.ep * layout.etp * layout.pp),
        )
        if not backend.args.megatron.get("use_distributed_optimizer"):
            equal = equal_experts = 1
        gradient = 2.0 if backend.args.megatron.get("grad_reduce_in_bf16") else 4.0
        sizes = {
            "weights": 2.0 * (dense + experts),
            "gradients": gradient * (dense + experts),
            "optimizer": 12.0 * (dense / equal + experts / equal_experts),
        }
    model_parallel = (
        backend.world_size // backend.data_parallel_size
        if layout is None
        else layout.tp * layout.pp * layout.cp
    )
    c = config
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    per_token = (
        c.hidden_size + (q + 2 * kv) + (q + kv) + q + c.hidden_size + 2 * c.intermediate_size
    )
    kept = per_token * c.num_hidden_layers
    again = c.num_hidden_layers if options.recompute else _recomputed_layers(rest)
    kept -= (per_token - c.hidden_size) * again
    element = 2 if torch.cuda.is_available() else 4
    sizes["activations"] = element * kept * options.tokens / model_parallel
    return {name: round(size / GIB, 2) for name, size in sizes.items()} | {
        "sum": round(sum(sizes.values()) / GIB, 2)
    }


def _recomputed_layers(rest: list[str]) -> int:
    """Of ``--recompute-method block``, in the trainer's flags."""
    return (
        int(rest[rest.index("--recompute-num-layers") + 1])
        if "--recompute-num-layers" in rest
        else 0
    )


def measure(options: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from random_model import make_config

    from slime.backends.advantages import AdvantageSettings, compute_advantages
    from slime.backends.create import create_backend
    from slime.models.flash_attention import is_installed

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    args = make_args(options, rest, world)
    address, port = (
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ.get("MASTER_PORT", 0)) or _free_port(),
    )
    # torchrun's own store listens on MASTER_PORT: rank 0 opens a second one beside it, for which
    # this must be off.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    if options.no_checkpoint:
        build_without_checkpoint()
    progress("building the model")
    started = time.perf_counter()
    backend: Any = create_backend(
        args, "actor", rank, world, address, port + (1 if world > 1 else 0), local_rank
    )
    loading = time.perf_counter() - started
    progress(f"loaded in {loading:.1f} s")
    device = getattr(backend, "device", torch.device(options.device))
    rate = matmul_rate(device)
    config = make_config(options.shape)
    data_parallel = backend.data_parallel_size
    batch = make_batch(options, config.vocab_size, backend.data_parallel_rank, data_parallel)
    compute_advantages(AdvantageSettings.from_args(args), batch, backend.reduce)
    flops = forward_flops(config, batch) * data_parallel / world

    warming: list[float] = []

    def passes(name: str, work: Callable[[RankBatch], object], share: float) -> list[float]:
        """Warm up, and return the seconds of each counted pass, whose FLOPs are ``share``."""
        for number in range(1, options.warmup + 1):
            warm = batch
            if options.warmup_tokens:  # of another length each, so that none is compiled for one
                fewer = argparse.Namespace(**vars(options))
                fewer.tokens = number * options.warmup_tokens
                fewer.sample_tokens = min(options.sample_tokens, fewer.tokens)
                rank = backend.data_parallel_rank
                warm = make_batch(fewer, config.vocab_size, rank, data_parallel)
                compute_advantages(AdvantageSettings.from_args(args), warm, backend.reduce)
            warming.append(timed(partial(work, warm), device))
            progress(f"{name} to warm up: {warming[-1]:.2f} s")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found = []
        for _ in range(options.steps):
            found.append(timed(partial(work, batch), device))
            used = share * flops / found[-1] / rate
            progress(f"{name}: {found[-1]:.4f} s, MFU {used:.1%} of {rate / 1e12:.1f} TFLOP/s")
        return found

    # The log-prob pass comes first, because a training step compiles more.
    step = lambda batch: backend.train_step(batch, 0)  # noqa: E731 - a name for what is timed
    score_seconds = passes("log-prob pass", backend.log_probs, 1.0)
    step_seconds = passes("training step", step, 3.0)
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    rate_after = matmul_rate(device)
    if options.profile:
        works = {"step": lambda: step(batch), "log-prob pass": lambda: backend.log_probs(batch)}
        write_profile(options, works, world)
    seconds, scoring = statistics.median(step_seconds), statistics.median(score_seconds)
    tokens = options.tokens * options.micro_batches * data_parallel / world
    result = {
        "benchmark": "train_mfu",
        "backend": options.backend,
        "shape": options.shape,
        "flags": rest,
        "gpus": world,
        "data_parallel": data_parallel,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "tokens_per_micro_batch": options.tokens,
        "micro_batches": options.micro_batches,
        "recompute": options.recompute,
        "compiled": bool(args.compile_layers),
        "flash_attention_4": device.type == "cuda" and is_installed(),
        "sample_tokens": options.sample_tokens,
        "matmul_tflops": round(rate / 1e12, 1),
        "matmul_tflops_after": round(rate_after / 1e12, 1),
        "train_mfu": round(3 * flops / seconds / rate, 4),
        "log_probs_mfu": round(flops / scoring / rate, 4),
        "train_seconds": [round(s, 4) for s in step_seconds],
        "log_probs_seconds": [round(s, 4) for s in score_seconds],
        "train_tokens_per_gpu_per_second": round(tokens / seconds, 1),
        "log_probs_tokens_per_gpu_per_second": round(tokens / scoring, 1),
        "loading_seconds": round(loading, 1),
        "warmup_seconds": round(sum(warming), 1),
        "peak_gib": round(peak, 2),
        "expected_gib": expected_memory(backend, config, options, rest),
        "torch": torch.__version__,
    }
    if dist.is_initialized():
        dist.barrier()
    return result


def file_name(options: argparse.Namespace, world: int) -> str:
    return options.name or f"train_mfu_{options.backend}_{options.shape}_{world}gpu"


def write_profile(options: argparse.Namespace, works: dict[str, Any], world: int) -> None:
    """Write the kernels of each of ``works``, as rank 0 sees them."""
    from kernel_table import kernel_table

    tables = [
        f"== {name}: {options.backend} {options.shape}\n{kernel_table(work)}"
        for name, work in works.items()
    ]
    if int(os.environ.get("RANK", 0)) == 0 and options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"{file_name(options, world)}_kernels.txt").write_text("\n".join(tables))


def _free_port() -> int:
    from slime.engines.process import free_port

    return free_port()


def main() -> None:
    options, rest = parse_options()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from random_model import write_model

    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        write_model(options.shape, options.model, weights=not options.no_checkpoint)
    while not (options.model / "complete").exists():  # another rank writes it
        time.sleep(0.2)
    result = measure(options, rest)
    if int(os.environ.get("RANK", 0)) == 0:
        expected = ", ".join(f"{name} {size:.1f}" for name, size in result["expected_gib"].items())
        print(
            f"{options.backend} {options.shape} on {result['gpus']} x {result['device']}: step "
            f"{statistics.median(result['train_seconds']):.3f} s, MFU {result['train_mfu']:.1%}, "
            f"log-probs {result['log_probs_mfu']:.1%} of {result['matmul_tflops']} TFLOP/s; "
            f"{result['train_tokens_per_gpu_per_second']:.0f} tokens/s per GPU; peak "
            f"{result['peak_gib']} GiB, must be there: {expected}"
        )
        line = json.dumps(result)
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / f"{file_name(options, result['gpus'])}.json").write_text(line + "\n")
        print(line, flush=True)
    _leave()


def _leave() -> None:
    """Without the destructors of process groups, which can wait for each other."""
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
