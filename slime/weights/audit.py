"""Check after each sync that the engines have the weights that the trainer sent. A mismatch ends
the run.

(a) :func:`check_probe`: Every engine and the trainer compute log-probs of the same fixed sequence.
(b) :func:`check_engines_agree`: Engines with the same layout must have equal checksums.
(c) :func:`overwrite` and :func:`check_restored`, before and after a sync of the same weights: Every
    tensor must be written.
(d) :func:`check_digests`: The digests of the sent tensors must equal those of the engine, by name.
    This is for engines that report their checksums by the names of the checkpoint. SGLang reports
    those of its own fused and divided tensors, so between two checks (c) only (a) and (b) compare
    its weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from slime.config.seeds import derive_seed
from slime.engines.handle import EngineHandle, on_each
from slime.engines.sglang_api import EngineInfo
from slime.weights.settings import WeightSyncSettings

PROBE_LENGTH = 64
FP8 = "fp8"
"""Stands for the dtype of engines whose weights are quantized."""
THRESHOLDS = {"float32": 1e-3, "float16": 0.25, "bfloat16": 1.0, FP8: 4.0}
"""The largest difference of a log-prob that rounding can explain in any model, by the coarser dtype
of trainer and engine. :class:`Calibration` learns a smaller limit for the model of the run. With
SmolLM2 and a probe of 64 random tokens, bfloat16 differs from float32 by up to 0.4, and a zeroed
matrix changes a log-prob by 3. Its weights in 8 bits change the log-probs of the probe by up to
2.4. Smaller errors in the weights are found with checksums."""
GAP_THRESHOLDS = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.1, FP8: 0.3}
"""The mean difference of the log-probs of a step above which there is a warning, by the coarser
dtype.
"""
_LAYOUT = (
    "pp_size", "dp_size", "ep_size", "ep_num_redundant_experts", "enable_dp_attention", "enable_dp_lm_head",
    "moe_dense_tp_size", "moe_runner_backend", "moe_a2a_backend", "quantization",
)  # fmt: skip
"""Options of SGLang, which server groups may override, on which the parts and layout of its tensors
depend.
"""
_SHOWN = 5


class WeightAuditError(RuntimeError):
    """The weights of an engine differ from those of the trainer.

    Attributes:
        engine: The URL of the engine.
        tensors: The names of the tensors that differ, if they are known.
    """

    def __init__(self, message: str, engine: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.engine = engine
        self.tensors = list(tensors)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.engine, self.tensors)


@dataclass(frozen=True)
class Probe:
    """A sequence, and the trainer's log-probs of all its tokens except the first (length
    ``len(tokens) - 1``).
    """

    tokens: Sequence[int]
    log_probs: Sequence[float]


def probe_tokens(vocab_size: int, seed: int = 0, length: int = PROBE_LENGTH) -> list[int]:
    """Return the fixed sequence of random ids, which is the same for the whole run and on every
    machine.
    """
    generator = random.Random(derive_seed(seed, "weight-probe"))
    return [generator.randrange(vocab_size) for _ in range(length)]


@dataclass
class Calibration:
    """The largest difference that rounding causes on the probe in this run, learned from updates
    that passed.

    The limit by dtype must be large enough for any model. The differences of one run are much
    smaller in most cases. So after the first update the limit is ``FACTOR`` times the largest
    difference so far plus ``MARGIN``, but never more than the limit by dtype.
    """

    FACTOR: ClassVar[float] = 3.0
    MARGIN: ClassVar[float] = 0.05
    largest: float | None = None

    def limit(self, by_dtype: float) -> float:
        if self.largest is None:
            return by_dtype
        return min(self.FACTOR * self.largest + self.MARGIN, by_dtype)

    def passed(self, differences: Iterable[float]) -> None:
        """Record the differences of an update that passed."""
        finite = [value for value in differences if math.isfinite(value)]
        if finite:
            self.largest = max(*finite, self.largest or 0.0)


def threshold(
    asked: float | None,
    train_dtype: str | None,
    infos: Iterable[EngineInfo],
    quantized: bool = False,
) -> float:
    """Return ``--audit-threshold`` if it is given, else the limit for the coarsest dtype of trainer
    and engines.

    Args:
        quantized: Whether the engines have quantized weights (``--rollout-quantization``).
    """
    if asked is not None:
        return asked
    dtypes = [FP8 if quantized else info.dtype.removeprefix("torch.") for info in infos]
    if train_dtype:
        dtypes.append(train_dtype)
    return max(
        (THRESHOLDS.get(dtype, THRESHOLDS["bfloat16"]) for dtype in dtypes),
        default=THRESHOLDS["bfloat16"],
    )


def gap_alarm(
    metrics: Mapping[str, float], limit: float | None, dtypes: Sequence[str | None]
) -> str | None:
    """Return a warning if the log-probs of trainer and engines differ too much on the samples of a
    step.

    There is a warning if the mean difference exceeds ``limit`` or is NaN. Otherwise, and if no
    engine returned log-probs, the result is None.

    Args:
        limit: ``--logprob-gap-threshold``; None for the limit of the coarsest of ``dtypes``.
        dtypes: The dtypes of trainer and engines; None for one that is not known.
    """
    mean = metrics.get("train/train_rollout_logprob_abs_diff")
    if mean is None:
        return None
    if limit is None:
        known = [GAP_THRESHOLDS.get(dtype, GAP_THRESHOLDS["bfloat16"]) for dtype in dtypes if dtype]
        limit = max(known, default=GAP_THRESHOLDS["bfloat16"])
    if mean <= limit:  # false for NaN, so that it is reported
        return None
    worst = metrics.get("train/train_rollout_logprob_abs_diff_max", math.nan)
    k3 = metrics.get("train/train_rollout_k3", math.nan)
    return (
        f"warning: log-probs of engines and trainer differ by {mean:.3g} on average (maximum "
        f"{worst:.3g}, k3 {k3:.3g}), more than --logprob-gap-threshold {limit:g}: samples may be "
        "stale, or numerics or weights may differ"
    )


async def audit_engines(
    engines: Sequence[EngineHandle],
    infos: Mapping[str, EngineInfo],
    sent: Mapping[str, str],
    deadline: float,
) -> None:
    """Make the checks (b) and (d) as far as there is something to compare.

    Args:
        sent: The digests of the sent tensors, for the engines with named checksums; empty without
            (d).

    Raises:
        WeightAuditError: The weights of an engine are wrong. The error names the engine and the
            tensors.
    """
    named = [engine for engine in engines if sent and engine.capabilities.named_checksums]
    asked = engines if len(engines) > 1 else named
    sums = await _checksums(asked, deadline)
    for layout in _layouts(asked, infos):
        check_engines_agree({engine.url: sums[engine.url] for engine in layout})
    for engine in named:
        check_digests(engine.url, sent, sums[engine.url])


async def _checksums(engines: Sequence[EngineHandle], deadline: float) -> dict[str, dict[str, str]]:
    """Return the digests of every engine's tensors by URL, or raise the first error."""
    sums, failed = await on_each(
        engines, lambda engine: engine.checksum(), "compute its checksums", deadline
    )
    for error in failed.values():
        raise error
    return sums


# --- (a) -----------------------------------------------------------------------------------------


async def score(
    engine: EngineHandle, tokens: Sequence[int], adapter: str | None = None
) -> list[float]:
    """Return the engine's log-probs of all tokens except the first, requested with ``/generate``.

    Args:
        adapter: The name of the adapter to compute with, for engines that load adapters by name.
    """
    request: dict[str, object] = {
        "input_ids": list(tokens),
        # Not greedy: if one request of a batch is greedy and others are not, SGLang samples all of
        # them with top-k, and it compiles the kernel for top-k at the first use.
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if adapter is not None:
        request["lora_path"] = adapter
    answer = await engine.generate(request)
    scored = answer["meta_info"]["input_token_logprobs"]
    values = [entry[0] for entry in scored if entry[0] is not None]
    if len(values) != len(tokens) - 1:
        raise WeightAuditError(
            f"engine {engine.url} returned {len(values)} of the {len(tokens) - 1} log-probs of "
            "the probe",
            engine.url,
        )
    return [float(value) for value in values]


async def check_probe(
    engines: Sequence[EngineHandle],
    probe: Probe,
    limit: float,
    deadline: float,
    adapter: str | None = None,
) -> dict[str, float]:
    """Compute the log-probs of the probe on every engine, and return the largest difference of each
    by URL.

    Args:
        adapter: The name of the adapter to compute with, for engines that load adapters by name.

    Rounding moves a log-prob in proportion to its size, so ``limit`` is for log-probs down to -10,
    and for smaller ones as many times larger. (Gemma-3-270M in bfloat16, with SGLang on an H200:
    1.2 at -21.)

    Raises:
        WeightAuditError: A difference is larger than its limit or NaN.
    """
    scores, failed = await on_each(
        engines,
        lambda engine: score(engine, probe.tokens, adapter),
        "score the probe",
        deadline,
    )
    for error in failed.values():
        raise error
    gaps = {}
    for url, values in scores.items():
        differences = [
            abs(ours - theirs) for ours, theirs in zip(probe.log_probs, values, strict=True)
        ]
        limits = [limit * max(1.0, -ours / 10) for ours in probe.log_probs]
        # The first part of the key makes a NaN the worst.
        worst = max(
            range(len(differences)),
            key=lambda i: (differences[i] != differences[i], differences[i] - limits[i]),
        )
        if not differences[worst] <= limits[worst]:  # also true for NaN
            raise WeightAuditError(
                f"engine {url} and the trainer disagree on the probe after the sync: the log-prob "
                f"of token {worst + 1} is {values[worst]:.6f} on the engine and "
                f"{probe.log_probs[worst]:.6f} on the trainer (the difference is "
                f"{differences[worst]:.2g}, the limit is {limits[worst]:.2g}). Either the weights "
                "differ, or --audit-threshold is too small for these dtypes",
                url,
            )
        gaps[url] = max(differences)
    return gaps


async def probe_engines(
    settings: WeightSyncSettings,
    engines: Sequence[EngineHandle],
    probe: Probe,
    calibration: Calibration | None = None,
) -> float:
    """Make the checks (a) and (b) after the engines can generate again, and return the largest
    difference of (a).

    A server that only prefills or only decodes cannot answer a request alone, so only (b) and (d)
    apply to it. The result is NaN if all servers are of this kind.
    """
    deadline = settings.phase_seconds
    infos, failed = await on_each(
        engines, lambda engine: engine.info(), "report its version", deadline
    )
    for error in failed.values():
        raise error
    whole = [e for e in engines if infos[e.url].extra.get("disaggregation_mode") in (None, "null")]
    quantized = settings.fp8 is not None
    given = settings.sync.audit_threshold
    limit = threshold(given, settings.train_dtype, infos.values(), quantized)
    if calibration is not None and given is None:
        limit = calibration.limit(limit)
    gaps = await check_probe(whole, probe, limit, deadline, settings.adapter_name)
    if calibration is not None:
        calibration.passed(gaps.values())
    # Engines with named checksums have passed (d) already, which is stricter than (b).
    others = [engine for engine in engines if not engine.capabilities.named_checksums]
    await audit_engines(others, infos, {}, deadline)
    return max(gaps.values(), default=math.nan)


# --- (b), (d) ------------------------------------------------------------------------------------


def check_engines_agree(sums: Mapping[str, Mapping[str, str]]) -> None:
    """Raise :class:`WeightAuditError` for an engine whose checksums differ from those of the
    majority.
    """
    if len(sums) < 2:
        return
    names = sorted({name for named in sums.values() for name in named})
    wrong: dict[str, list[str]] = {url: [] for url in sums}
    for name in names:
        values = [named.get(name, "absent") for named in sums.values()]
        common = max(values, key=values.count)
        for url, named in sums.items():
            if named.get(name, "absent") != common:
                wrong[url].append(name)
    for url, tensors in wrong.items():
        if tensors:
            raise WeightAuditError(
                f"the weights of engine {url} differ from those of the other engines: "
                f"{_list(tensors)}",
                url,
                tensors,
            )


def check_digests(url: str, sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Compare the digests of the sent tensors with those of an engine, by name.

    A name that only one side has is not an error here. Tied weights have only one name on the
    engine, frozen weights are not sent, and :func:`check_restored` finds tensors that are never
    written.

    Raises:
        WeightAuditError: Digests differ, or there is no common name.
    """
    common = sent.keys() & held.keys()
    if not common:
        raise WeightAuditError(
            f"engine {url} has none of the {len(sent)} tensors that were sent (for example "
            f"{min(sent)!r}); it has for example {min(held, default='nothing')!r}", url
        )  # fmt: skip
    wrong = sorted(name for name in common if sent[name] != held[name])
    if wrong:
        raise WeightAuditError(
            f"{len(wrong)} of {len(common)} tensors of engine {url} differ from those that were "
            f"sent: {_list(wrong)}",
            url,
            wrong,
        )


def _layouts(
    engines: Sequence[EngineHandle], infos: Mapping[str, EngineInfo]
) -> list[list[EngineHandle]]:
    """Group engines whose checksums must be equal, because server, dtype and parallel layout are
    the same.
    """
    groups: dict[tuple[object, ...], list[EngineHandle]] = {}
    for engine in engines:
        info = infos[engine.url]
        key = (
            info.kind,
            info.version,
            info.dtype,
            info.tensor_parallel_size,
            *map(info.extra.get, _LAYOUT),
        )
        groups.setdefault(key, []).append(engine)
    return list(groups.values())


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


# --- (c) -----------------------------------------------------------------------------------------


async def overwrite(engine: EngineHandle) -> dict[str, str]:
    """Let the engine fill its weights with noise, and return the checksums from before.

    SGLang's own snapshot and comparison are not used, because they need CUDA and memory for a copy
    of the weights.
    """
    before = await engine.checksum()
    await engine.check_weights("reset_tensors")
    return before


async def check_restored(
    engines: Sequence[EngineHandle], before: Mapping[str, Mapping[str, str]], deadline: float
) -> None:
    """Check after a sync of the same weights that every tensor has its old value again.

    Args:
        before: The checksums that :func:`overwrite` returned, by engine URL.

    Raises:
        WeightAuditError: Some tensors differ. The error names the engine and the tensors.
    """
    after = await _checksums(engines, deadline)
    for url, held in after.items():
        wrong = sorted(name for name, digest in before[url].items() if held.get(name) != digest)
        if wrong:
            raise WeightAuditError(
                f"the weights of engine {url} changed although the same weights were sent again: "
                f"{len(wrong)} of {len(held)} tensors differ: {_list(wrong)}",
                url,
                wrong,
            )
