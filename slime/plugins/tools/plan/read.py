"""What a plan is computed from, read from the flags of a run; and whether the run will fit on the
GPUs of this machine, for ``--dry-run`` and the start of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from slime.checkpoint.files import try_to_write
from slime.config.engine import FIRST_CONCURRENCY
from slime.config.layout import ParallelLayout
from slime.config.lora import EXPERTS
from slime.data.schedule import PackingSettings

from .memory import engine_weights, train_memory, trained_parameters
from .plan import Run, make_plan
from .seconds import MOST, response_lengths
from .setups import (
    GIB,
    KINDS,
    EngineSetup,
    GpuKind,
    Packs,
    Placement,
    PlannedModel,
    TrainSetup,
    Workload,
)

if TYPE_CHECKING:
    from slime.config.args import Args

DEFAULT_FRACTION = 0.8
"""Assumed where ``--sglang-mem-fraction-static`` is not given; SGLang chooses it by the GPU."""
ASSUMED_PROMPT = 256.0
_DRIVER = Path("/proc/driver/nvidia/gpus")


def read_run(
    args: Args,
    kind: GpuKind,
    asynchronous: bool = False,
    prompt_tokens: float = ASSUMED_PROMPT,
    response_tokens: float | None = None,
    sigma: float = 0.0,
    lengths: tuple[int, ...] = (),
) -> Run | None:
    """Read a run from resolved flags; None if config.json of the model is not on this machine. The
    passes for log-probs are left to the caller.

    Args:
        response_tokens: Mean length, before those above the largest length are cut; None for the
            largest length, which overestimates memory and seconds.
        lengths: Measured response lengths in ascending order, instead of ``response_tokens`` and
            ``sigma``.
    """
    model = PlannedModel.from_checkpoint(args.hf_checkpoint)
    if model is None:
        return None
    # Lengths of responses: measured, drawn from a distribution, or all the same.
    longest = args.rollout_max_response_len
    lengths = tuple(min(length, longest) for length in lengths)
    # cut at the largest length, so that training has the tokens that are generated
    if sigma and not lengths:
        drawn = Workload(
            response_tokens=response_tokens or float(longest), longest=longest, sigma=sigma
        )
        lengths = tuple(sorted(response_lengths(drawn, MOST)))
    # What a rollout consists of, and how its samples are packed.
    packing = PackingSettings.from_args(args)
    work = Workload(
        prompts=args.rollout_batch_size,
        samples=args.n_samples_per_prompt,
        prompt_tokens=prompt_tokens,
        response_tokens=fmean(lengths)
        if lengths
        else min(response_tokens or longest, float(longest)),
        longest=longest,
        sigma=sigma,
        steps=args.num_steps_per_rollout or 1,
        shared_prompts=packing.shares_prompts and (packing.dynamic or packing.micro_batch_size > 1),
        lengths=lengths,
    )
    # Who shares the GPUs.
    place = Placement(
        colocate=args.colocate,
        offload_train=bool(args.offload_train),
        offload_rollout=bool(args.offload_rollout),
        critic_gpus=args.critic_gpus,
        gpus_per_node=max(args.actor_num_gpus_per_node or 1, 1 if args.actor_num_nodes > 1 else 8),
    )
    micro_batch = None if packing.dynamic else packing.micro_batch_size * (prompt_tokens + longest)
    train = None if args.debug_rollout_only else _train(args, micro_batch)
    engine = None if args.debug_train_only or args.rollout_external_engine_addrs else _engine(args)
    return Run(model, kind, train, engine, place, work, asynchronous)


def _train(args: Args, micro_batch: float | None) -> TrainSetup:
    """``micro_batch``: the largest number of tokens of a micro-batch with
    ``--micro-batch-size``.
    """
    # What is recomputed: Megatron says so in several flags.
    given = args.megatron
    layout = ParallelLayout.from_args(args)
    if args.train_backend == "fsdp":
        layout = replace(layout, ep=args.fsdp_expert_parallel_size)
    layers = given.get("recompute_num_layers") if given.get("recompute_method") == "block" else None
    recomputed = int(layers or -1) if args.gradient_checkpointing else 0
    if args.train_backend == "megatron":
        granularity = given.get("recompute_granularity")
        # attention's inside alone, of which FlashAttention keeps nothing
        if granularity == "selective" or (not granularity and given.get("recompute_activations")):
            recomputed = 0
        elif recomputed > 0:  # so many in each stage
            recomputed *= layout.pp
    return TrainSetup(
        backend=str(args.train_backend),
        layout=layout,
        tokens=ceil(micro_batch / layout.cp) if micro_batch else args.max_tokens_per_gpu or 16384,
        shards=args.fsdp_shard_size or 0,
        recomputed=recomputed,
        gradient_bytes=2 if given.get("grad_reduce_in_bf16") else 4,
        moments=not args.use_stateless_adam,
        optimizer_on_cpu=bool(given.get("optimizer_cpu_offload")),
        distributed_optimizer=bool(given.get("use_distributed_optimizer", True)),
        lora_rank=args.lora_rank or 0,
        compiled=bool(args.compile_layers),
        reshard=bool(args.fsdp_reshard_after_forward),
        dtype_bytes=4 if args.train_dtype == "float32" else 2,
        lora_experts=bool(args.lora_rank) and EXPERTS in args.lora_target_modules,
        master_bytes=2.0 if args.bf16_master_weights else 4.0,
        moment_bytes=2.0 if args.optimizer_8bit else 8.0,
        state_on_cpu=args.fsdp_cpu_offload,
        inputs_on_cpu=args.offload_activations,
        by_heads=args.context_parallel_kind == "ulysses",
        float8=args.float8_training is not None,
        quantized_base=args.lora_base_quantization is not None,
    )


def _engine(args: Args) -> EngineSetup:
    gpus = max(args.rollout_num_gpus_per_engine, 1)
    return EngineSetup(
        engines=max((args.rollout_num_gpus or gpus) // gpus, 1),
        gpus=gpus,
        fraction=float(args.sglang.get("mem_fraction_static") or DEFAULT_FRACTION),
        slots=args.sglang_server_concurrency or FIRST_CONCURRENCY,
        cuda_graphs=not args.sglang.get("disable_cuda_graph"),
        dtype_bytes=4 if args.rollout_dtype == "float32" else 2,
        quantized=args.rollout_quantization is not None,
    )


def kind_by_name(name: str) -> GpuKind | None:
    """Return the kind by the driver's name of a GPU (``NVIDIA A100-SXM4-80GB``); None if it is not
    known.
    """
    words = re.split(r"[\s-]+", name.lower())
    if "a100" in words:
        return KINDS["a100-40gb" if "40gb" in words else "a100"]
    return next((KINDS[word] for word in words if word in KINDS), None)


def installed_kind(folder: Path = _DRIVER) -> GpuKind | None:
    """Return the kind of this machine's first GPU, without torch; None if there is none, or if it
    is not known.
    """
    # The driver writes it there, also where torch is not installed.
    for file in sorted(folder.glob("*/information")):
        match = re.search(r"^Model:\s*(.+)$", file.read_text(errors="replace"), re.MULTILINE)
        return kind_by_name(match.group(1)) if match else None
    return None


def misfits(args: Args, asynchronous: bool = False) -> list[str]:
    """Say why a run may not fit on this machine's GPUs. Empty if it fits, or
    if it is not known.

    It is not an error, because the estimate can be wrong by a tenth and does not include users'
    functions. The embedded engine sizes its cache by the memory that is free, so a run with it is
    not judged.
    """
    kind = installed_kind()
    if kind is None or (args.rollout_backend == "embedded" and not args.debug_train_only):
        return []
    run = read_run(args, kind, asynchronous)
    return list(make_plan(run).problems) if run is not None else []


def memory_lines(args: Args) -> Iterator[str]:
    """One line each for the model, the trainer, an engine and a snapshot; activations and KV caches
    are left out.
    """
    model = PlannedModel.from_checkpoint(args.hf_checkpoint)
    if model is None:
        yield "not known: config.json of the model cannot be read here, or lacks its size"
        return
    yield f"model           {model.parameters / 1e6:,.1f} M parameters"
    if not args.debug_rollout_only:
        setup = replace(_train(args, None), state_on_cpu=False)
        memory = train_memory(model, setup, Packs(1, 0.0, 0.0, 0.0))
        size = (memory.weights + memory.gradients + memory.optimizer) * (
            2 if args.use_critic else 1
        )
        where = " of CPU memory" if args.fsdp_cpu_offload else ""
        yield (
            f"training        {size / GIB:.2f} GiB{where} per rank: weights, gradients and the "
            "optimizer's state"
        )
    if not args.debug_train_only:
        weights = engine_weights(model, _engine(args)) / GIB
        yield f"an engine       {weights:.2f} GiB of weights on each of its GPUs"
    if args.save:
        yield f"a snapshot      {snapshot_bytes(args) / GIB:.2f} GiB on the disk"


def snapshot_bytes(args: Args) -> int:
    """Approximate size of a snapshot in bytes: master weights and Adam's two moments; 0 if it
    cannot be known.
    """
    model = PlannedModel.from_checkpoint(args.hf_checkpoint)
    if model is None:
        return 0
    setup = _train(args, None)
    kept = setup.moments and not args.no_save_optim
    each = setup.master_bytes + (setup.moment_bytes if kept else 0.0)
    return int(trained_parameters(model, setup) * each) * (2 if args.use_critic else 1)


def check_save_folder(args: Args) -> list[str]:
    """Check that this machine can write to ``--save`` and ``--save-hf``, and that there is room for a
    snapshot.
    """
    export = args.save_hf and args.save_hf.format(rollout_id=0)
    places = ("--save", args.save, snapshot_bytes(args)), ("--save-hf", export, 0)
    return [
        f"{flag} {place} {problem}: name another folder, or make room"
        for flag, place, needed in places
        if place and (problem := try_to_write(Path(place).expanduser(), needed))
    ]


def report(kind: GpuKind | None, run: Run | None, problems: Sequence[str]) -> list[str]:
    """The memory of each phase of a step on GPUs of a kind, and ``problems``: why the run does not
    fit.
    """
    if kind is None:
        return [
            "whether it fits on GPUs of a certain kind: slime plan --kind KIND, with the same flags"
        ]
    phases = make_plan(run).phases if run is not None else ()
    return [
        f"memory by phase on each GPU ({kind.name}; slime plan shows what it consists of)",
        *(
            f"  {phase.name:<15} {phase.total / GIB:.1f} GiB of {kind.memory / GIB:.1f}"
            for phase in phases
        ),
        *(f"  warning: {problem}" for problem in problems),
    ]
