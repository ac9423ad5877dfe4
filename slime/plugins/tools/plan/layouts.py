"""All legal layouts of a run on a number of GPUs, and the order of their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import log

from slime.config.layout import ParallelLayout

from .plan import Plan, Run, make_plan


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def layouts(
    run: Run, gpus: int, backends: tuple[str, ...] = ("fsdp", "megatron")
) -> Iterator[tuple[str, ParallelLayout]]:
    """List the training layouts that ``gpus`` GPUs and the model allow.

    Tensor parallelism stays within a node and divides the heads; pipeline stages have equal numbers
    of layers; context parallelism is at most 8; expert parallelism divides the experts. The samples
    of an optimizer step are divisible among the data-parallel ranks.
    """
    shape = run.model.shape
    samples = run.work.count // run.work.steps
    nodes = run.place.gpus_per_node
    # FSDP is divided over data and context alone.
    for cp in (size for size in divisors(gpus) if size <= 8):
        if "fsdp" in backends and samples % (gpus // cp) == 0:
            yield "fsdp", ParallelLayout(world_size=gpus, cp=cp)
        # Megatron is divided in every way that its sizes allow.
        for tp in divisors(gpus // cp) if "megatron" in backends else ():
            if tp > nodes or shape.heads % tp or shape.kv_heads % tp:
                continue
            for pp in divisors(gpus // cp // tp):
                layout = ParallelLayout(world_size=gpus, tp=tp, pp=pp, cp=cp)
                if shape.layers % pp or samples % layout.dp or layout.problems():
                    continue
                for ep in divisors(gpus // pp // tp) if shape.experts else [1]:
                    split = replace(layout, ep=ep, etp=1 if ep > 1 or not shape.experts else tp)
                    if not shape.experts or (shape.experts % ep == 0 and not split.problems()):
                        yield "megatron", split


def candidates(run: Run, gpus: int) -> Iterator[Run]:
    """List the runs on ``gpus`` GPUs: each layout, size of an engine, recomputation or none,
    colocated or apart.

    Apart, the run is asynchronous and the engines get one to seven eighths of the GPUs.
    """
    trainer, engines = run.both
    # All GPUs for both sides in turn, or some for each.
    shares = [(gpus, gpus)] + [
        (gpus - share, share)
        for share in sorted({gpus * part // 8 for part in range(1, 8)} - {0, gpus})
    ]
    for trained, generating in shares:
        if trainer.quantized_base and trained > 1:
            continue  # it is not sharded
        shared = trained == generating == gpus
        for backend, layout in layouts(
            run, trained, ("fsdp",) if trainer.fsdp_only else ("fsdp", "megatron")
        ):
            for size in (1, 2, 4, 8):
                if (
                    generating % size
                    or size > run.place.gpus_per_node
                    or run.model.shape.heads % size
                ):
                    continue
                engine = replace(engines, engines=generating // size, gpus=size)
                for recomputed in (-1,) if trainer.inputs_on_cpu else (0, -1):
                    train = replace(
                        trainer, backend=backend, layout=layout, recomputed=recomputed, shards=0
                    )
                    place = replace(run.place, colocate=shared)
                    yield replace(
                        run, train=train, engine=engine, place=place, asynchronous=not shared
                    )


@lru_cache(maxsize=4)
def fitting(run: Run, gpus: int) -> tuple[Plan, ...]:
    """Return the plans of all candidates that fit."""
    return tuple(plan for one in candidates(run, gpus) if (plan := make_plan(one)).fits)


def best(run: Run, gpus: int, count: int = 5) -> list[Plan]:
    """Return the ``count`` fastest plans that fit, one for each backend, size of an engine and
    share of the GPUs.

    Steps that differ by less than a hundredth are equal: what was measured comes before what is
    extrapolated, and less work of the GPUs before more.
    """

    def order(plan: Plan) -> tuple[int, int, float]:
        return (round(log(plan.step) / 0.01), len(plan.extrapolated), sum(plan.seconds.values()))

    # Only the best of each kind, since many layouts differ by little.
    found: dict[tuple[str, int, int, int], Plan] = {}
    for plan in sorted(fitting(run, gpus), key=order):
        train, engine = plan.run.both
        found.setdefault(
            (train.backend, train.layout.world_size, engine.engines, engine.gpus), plan
        )
    return list(found.values())[:count]


def flags(plan: Plan) -> list[str]:
    """Return the flags of train.py (of train_async.py, if the plan is asynchronous) that set layout
    and placement.
    """
    run = plan.run
    train, engine = run.both
    layout = train.layout
    per_node = run.place.gpus_per_node
    world = layout.world_size
    # The fewest nodes that hold the ranks in equal numbers.
    nodes = next(n for n in range(1, world + 1) if world % n == 0 and world // n <= per_node)
    words = [f"--train-backend {train.backend}", f"--actor-num-nodes {nodes}"]
    words += [f"--actor-num-gpus-per-node {world // nodes}"]
    sizes = (
        ("tensor-model", layout.tp),
        ("pipeline-model", layout.pp),
        ("context", layout.cp),
        ("expert-model", layout.ep),
    )
    words += [f"--{name}-parallel-size {size}" for name, size in sizes if size > 1]
    if layout.tp > 1:
        words.append("--sequence-parallel")
    if run.model.experts and layout.etp != layout.tp:
        words.append(f"--expert-tensor-parallel-size {layout.etp}")
    if train.recomputed:
        words.append("--gradient-checkpointing" if train.backend == "fsdp" else _RECOMPUTE)
    words.append(
        "--colocate" if run.place.colocate else f"--rollout-num-gpus {engine.engines * engine.gpus}"
    )
    if engine.gpus > 1:
        words.append(f"--rollout-num-gpus-per-engine {engine.gpus}")
    return [*words, f"--max-tokens-per-gpu {train.tokens}"]


_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_OF_LAYOUT = (
    "--colocate", "--rollout-num-gpus", "--rollout-num-gpus-per-engine", "--gradient-checkpointing",
    "--recompute-activations", "--recompute-granularity", "--recompute-method", "--recompute-num-layers",
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
    "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--sequence-parallel",
    "--virtual-pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank", "--fsdp-shard-size",
)  # fmt: skip


def left_out(printed: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return the flags of a command that must be left out when the printed ones are added at its
    end.

    Args:
        printed: From :func:`flags`.
        given: The words of the command.
    """
    replaced = {word for words in printed for word in words.split()}
    options = dict.fromkeys(word.partition("=")[0] for word in given)
    return [option for option in options if option in _OF_LAYOUT and option not in replaced]
