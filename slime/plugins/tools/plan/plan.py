"""A plan: memory by phase, seconds by phase, and whether the run fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slime.config.layout import ParallelLayout

from .memory import Phase, cache_tokens, phases, train_memory
from .seconds import HOST_COPY, rollout_seconds, sync_seconds, train_seconds
from .setups import (
    EngineSetup,
    GpuKind,
    Packs,
    Placement,
    PlannedModel,
    TrainSetup,
    Workload,
    packs,
)

MEASURED = {"fsdp": ({"dp"}, 4), "megatron": ({"dp", "tp", "ep"}, 4)}
"""By backend: the parallel sizes above 1 that were measured on H200s, and the largest number of
GPUs.
"""


@dataclass(frozen=True)
class Run:
    """Everything that a plan is computed from. ``train`` or ``engine`` is None in runs with one
    side alone.
    """

    model: PlannedModel
    kind: GpuKind
    train: TrainSetup | None
    engine: EngineSetup | None
    place: Placement
    work: Workload
    asynchronous: bool = False

    @property
    def both(self) -> tuple[TrainSetup, EngineSetup]:
        """Trainer and engines of a run that has both."""
        assert self.train is not None and self.engine is not None
        return self.train, self.engine


@dataclass(frozen=True)
class Plan:
    """What is to be expected of a run.

    Attributes:
        phases: Device memory by phase.
        seconds: Of each phase of a step.
        step: Seconds of a step; of an asynchronous run, the longer of both sides.
        extrapolated: What about this run was never measured.
        problems: Why it does not fit; empty if it fits.
    """

    run: Run
    phases: tuple[Phase, ...]
    seconds: dict[str, float]
    step: float
    extrapolated: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def gpus(self) -> int:
        trained = self.run.train.layout.world_size if self.run.train else 0
        generating = self.run.engine.engines * self.run.engine.gpus if self.run.engine else 0
        shared = max(trained, generating) if self.run.place.colocate else trained + generating
        return shared + self.run.place.critic_gpus

    @property
    def samples_per_gpu_second(self) -> float:
        return self.run.work.count / self.step / self.gpus if self.step else 0.0


def make_plan(run: Run) -> Plan:
    """Compute the plan of a run."""
    train = run.train
    work = run.work
    longest = work.prompt_tokens + work.longest
    # Memory must suffice for the largest micro-batch, seconds are those of the mean.
    batch = full(packs(work, train or TrainSetup("fsdp", ParallelLayout())), train, longest)
    memory = tuple(phases(run.model, run.kind, train, run.engine, run.place, batch))
    seconds = _seconds(run)
    step = sum(seconds.values())
    # Both sides work at the same time.
    if run.asynchronous:
        generation = seconds.get("generate", 0.0)
        step = max(generation, step - generation)
    return Plan(
        run, memory, seconds, step, tuple(_extrapolated(run)), tuple(_problems(run, memory))
    )


def without_offloading(plan: Plan) -> Plan | None:
    """Return the plan in which the trainer's state stays on the GPU while engines generate as many
    responses at once.

    None if this does not fit, is not faster, or is what the run does already. The engines get a
    twentieth of the GPU more than the responses take at their mean length.
    """
    run = plan.run
    if (
        run.train is None
        or run.engine is None
        or not (run.place.colocate and run.place.offload_train)
    ):
        return None
    # The smallest share of the GPU with which engines run as many requests at once, and the next
    # one.
    engines = [replace(run.engine, fraction=percent / 100) for percent in range(10, 95, 5)]
    enough = [engine for engine in engines if slots(run, engine) == slots(run, run.engine)][1:2]
    place = replace(run.place, offload_train=False)
    resident = [make_plan(replace(run, engine=engine, place=place)) for engine in enough]
    return next((other for other in resident if other.fits and other.step < plan.step), None)


def full(batch: Packs, train: TrainSetup | None, longest: float) -> Packs:
    """Return the micro-batches as large as they can be: with several, one may be as large as the
    token budget, or as the longest sample, which is a micro-batch of its own if the budget is
    smaller."""
    if train is None or batch.count == 1:
        return batch
    budget = max(train.tokens * train.layout.cp, longest)
    return replace(batch, tokens=float(budget), scored=batch.scored * budget / batch.tokens)


def slots(run: Run, engine: EngineSetup) -> int:
    """Requests that fit into the KV cache of an engine at their mean length, at most
    ``engine.slots``.
    """
    room = cache_tokens(run.model, run.kind, engine) / max(run.work.length, 1.0)
    return max(min(engine.slots, int(room)), 1)


def _seconds(run: Run) -> dict[str, float]:
    seconds: dict[str, float] = {}
    shared = run.place.colocate and run.train is not None and run.engine is not None
    if run.engine is not None:
        seconds["generate"] = rollout_seconds(
            run.model, run.kind, run.engine, run.work, slots(run, run.engine)
        )
    if run.train is None:
        return seconds
    # The trainer leaves the GPU to the engines, and comes back.
    batch = packs(run.work, run.train)
    step = train_seconds(run.model, run.kind, run.train, batch, run.place.gpus_per_node)
    moved = (
        train_memory(run.model, run.train, batch).state
        if shared and run.place.offload_train
        else 0.0
    )
    if moved:
        seconds["wake up and sleep"] = 2 * moved / HOST_COPY
    if run.work.log_prob_passes:
        seconds["log-probs"] = run.work.log_prob_passes * run.work.steps * step.scoring
    seconds["train"] = run.work.steps * step.step
    if run.engine is not None:
        seconds["weight sync"] = sync_seconds(run.model, run.engine)
    return seconds


def _problems(run: Run, memory: tuple[Phase, ...]) -> list[str]:
    problems = []
    for phase in memory:
        if phase.total > run.kind.memory:
            largest = max(phase.parts, key=lambda name: phase.parts[name])
            problems.append(
                f"{phase.name} needs {phase.total / 2**30:.1f} GiB of "
                f"{run.kind.memory / 2**30:.1f} on each GPU, most of it for {largest} "
                f"({phase.parts[largest] / 2**30:.1f}): {_remedy(run, largest)}"
            )
    if (
        run.engine is not None
        and cache_tokens(run.model, run.kind, run.engine)
        < run.work.prompt_tokens + run.work.longest
    ):
        problems.append(
            f"the engine's memory ({run.engine.fraction:g} of the GPU) has no room for its "
            "weights and the KV cache of one response of the largest length: raise "
            "--rollout-num-gpus-per-engine or --sglang-mem-fraction-static"
        )
    return problems


def _remedy(run: Run, largest: str) -> str:
    if largest in ("activations", "LM head"):
        return "lower --max-tokens-per-gpu, or add --gradient-checkpointing"
    if largest.startswith("engine"):
        return "lower --sglang-mem-fraction-static, or leave offloading on"
    if run.train is not None and run.train.backend == "megatron":
        return "use more GPUs, a larger --tensor-model-parallel-size, or --optimizer-cpu-offload"
    return "use more GPUs, or train an adapter with --lora-rank"


def _extrapolated(run: Run) -> list[str]:
    """Say what about a run was never measured."""
    model = run.model
    kind = run.kind
    train = run.train
    rows: list[tuple[object, str]] = [
        (
            not kind.measured,
            f"GPU {kind.name}: no measurement; its data sheet, with the shares that an H200 reaches",
        )
    ]
    # The layout, the kind of model and the options of the trainer.
    if train is not None:
        layout = train.layout
        dimensions, most = MEASURED[train.backend]
        sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep}
        new = " ".join(
            f"{name.upper()}{size}"
            for name, size in sizes.items()
            if size > 1 and name not in dimensions
        )
        rows += [
            (new, f"layout {new} with {train.backend}: never measured"),
            (layout.tp > 2, f"TP{layout.tp}: at most TP2 was measured"),
            (layout.world_size > most, f"{layout.world_size} training GPUs: measured up to {most}"),
            (
                train.backend == "fsdp" and model.shape.experts,
                "a model with experts on fsdp: measured on megatron only",
            ),
            (train.lora_rank, "LoRA: one step was measured"),
            (not train.compiled, "layers that are not compiled: the factor is assumed"),
            *_untimed(train),
        ]
    # The model and the engines.
    rows += [
        (model.shape.kv_rank is not None, "multi-latent attention: no measurement"),
        (
            model.others,
            f"layers of kind {', '.join(model.others)}: their work is counted as that of attention "
            "layers",
        ),
    ]
    if run.engine is not None:
        rows += [
            (run.engine.gpus > 2, f"engines of {run.engine.gpus} GPUs: at most 2 were measured"),
            (model.shape.experts, "generation with experts: no measurement"),
            (
                run.engine.quantized,
                "--rollout-quantization: the memory counts 8-bit matrices; the seconds are those of "
                "unquantized weights",
            ),
        ]
    later = (
        "asynchronous step: the longer of both sides, without what waits for weights and for old "
        "samples; with a distribution of lengths, the modes below are simulated"
    )
    return [text for holds, text in [*rows, (run.asynchronous, later)] if holds]


def _untimed(train: TrainSetup) -> list[tuple[object, str]]:
    """The options whose memory is counted by arithmetic alone, and what their seconds leave out."""
    computed = "the memory is computed, the seconds are those without it"
    neither = "memory and seconds are those without it"
    experts = (
        "factors and the sums of one layer are counted, their seconds are not; without "
        "recomputation, each layer may keep its sum besides"
        if train.backend == "fsdp"
        else "the memory of the factors is counted, their seconds are not"
    )
    return [
        (train.moment_bytes < 8, f"--optimizer-8bit: {computed}"),
        (train.master_bytes < 4, f"--bf16-master-weights: {computed}"),
        (train.inputs_on_cpu, f"--offload-activations: {computed}"),
        (train.quantized_base, f"--lora-base-quantization: {neither}"),
        (train.float8, f"--float8-training: {neither}"),
        (
            train.state_on_cpu,
            "--fsdp-cpu-offload: the memory is computed; Adam has the rate of Megatron's on 16 CPU "
            "cores, and the copies have that of one measurement",
        ),
        (train.lora_experts, f"--lora-target-modules experts: {experts}"),
    ]
