"""The one table of names: which class or function a name stands for, slime's own and those of other
packages.

A part is registered with the place of its code, so nothing is imported before a run uses it::

    from slime.registry import register

    def parts() -> None:
        register("reward", "haiku", "my_package.haiku:HAIKU")

A package names such a function as an entry point of the group ``slime.plugins``. It is called once
in each process, when a name is first asked for. The plug-ins in :mod:`slime.plugins` have a
function ``parts`` too, and the core's own parts are at the end of this file.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

GROUP = "slime.plugins"
"""The group of entry points of other packages."""

KINDS = {
    "algorithm": "a class that derives from slime.algorithms.Algorithm, for --advantage-estimator",
    "backend": "a class with the members of slime.backends.base.TrainBackend, for --train-backend; "
    "its module is imported before CUDA is initialized",
    "optimizer": "a class that derives from slime.backends.fsdp.optimizer.ScheduledAdamW, for --optimizer "
    "with FSDP",
    "loss": "a class that derives from slime.backends.loss_type.LossType, for --loss-type",
    "reward": "a slime.rollout.rm_hub.reward.Reward, for --rm-type",
    "environment": "a function make(what, **options) that returns an Environment, for --environment",
    "engine": "a function start(settings, spec, host, log_path, gpu_ids, node) that returns a "
    "RunningEngine",
    "options": "a slime.config.passthrough.ProgramOptions: flags --NAME-… for the program of this name, "
    "such as the server of an engine",
    "kernels": "a function use(model) that exchanges the kernels of a Hugging Face model, as trainer and as "
    "embedded engine, and returns slime.models.token_log_probs.Kernels",
    "served kernels": "the options and the environment of SGLang servers in which the kernels of this name "
    "compute",
    "rules": "a slime.config.rules.RuleSet, or a table of rows (package:rules.json): which flags exclude "
    "or need each other",
    "groups": "a function read(file, hf_checkpoint, num_gpus_per_engine) that returns the "
    "slime.config.engine.ServedModel of --sglang-config",
    "layout": "a function layout(args) that returns the slime.config.layout.ParallelLayout of the ranks of "
    "the training backend of this name",
    "actors": "a class that derives from slime.cluster.actors.Actors: `ray`, and `inline` for --inline",
    "recovery": "a class of (parts), the slime.cluster.run.Recovery of a run, with a function supervise() that "
    "makes this process the supervisor of its driver; its name is `restarts`",
    "generator": "a function start(args, fleet) that returns the slime.cluster.engine_calls.Workers of "
    "--rollout-workers",
    "transport": "a slime.weights.transports.base.TransportKind, for --update-weight-transport",
    "weight mode": "the same, for --update-weight-mode, which then decides about the transport",
    "tracker": "a class that derives from slime.observability.trackers.Tracker, for --tracker",
    "layer kind": "a slime.models.layer_kinds.LayerKind: a way in which layers of a model mix tokens",
    "model family": "a slime.plugins.megatron.maps.family.Family: the weight map of a model for Megatron",
    "quantization": "a function read(quantization, headers, read) that returns the "
    "slime.models.quantized.Weight of each name, for a quant_method of config.json",
    "checkpoint": "a function open(path, hf_checkpoint, model_name, trust_remote_code) that returns the "
    "NamedWeights of another program's folder",
    "checkpoint folder": "a function find(path, step) that returns the folder of such a checkpoint in the "
    "one that a flag names, or None",
    "command": "a function add(commands) that adds a subcommand of slime to argparse's subparsers",
    "other flags": "a function find() that returns a function add(parser), which adds the flags of another "
    "program and returns a problem or None; None if the program is not there",
    "missing flag": "a function why(option) that says why slime has no such flag, or None",
    "data name": "a function named(text) that returns what text names, a slime.config.files.NamedData, or "
    "None",
    "resolver": "a function resolve(args) that fills in defaults before the data are read, and returns "
    "problems",
    "group listener": "a function listen(args, source, event, group), called with each event of a group "
    "(slime.rollout.state.Observer); what it changes in the metadata of the data source is in the snapshot",
    "check": "a function check(args) that returns problems, one line each, before a run starts",
    "warning": "a function warn(args, asynchronous) that returns lines, which are printed after the "
    "name at the start",
    "summary": "what is shown of a finished run: finish(run_dir, console, seconds, since), "
    "figures(run_dir), picture(figures) and write_picture(path, figures)",
    "record": "a class of (engines, is_paused, file), the slime.cluster.engine.LoadRecord of a run, whose "
    "name is `engine loads`",
    "client": "a function prepare() that is called before the first request of each process with users' "
    "functions",
    "report": "a function report(args, asynchronous) that returns lines for --dry-run",
}


class RegistryError(ValueError):
    """Raised for a name that is not registered, or that two packages register."""


@dataclass(frozen=True)
class Part:
    """One registered part.

    Attributes:
        target: The object itself, or its place (``package.module:name``).
        flags: A dataclass whose fields are flags (:func:`slime.config.flag.flag`), or its place;
            None for none.
        package: The module that the part needs, which may be missing, and what ``pip install`` gets
            it.
        when: For a check, a group listener or kernels: it is called only if one of these arguments is set, or
            has the value after ``=``; always without any.
    """

    kind: str
    name: str
    target: object
    flags: object = None
    package: tuple[str, str] | None = None
    when: tuple[str, ...] = ()


_parts: dict[tuple[str, str], Part] = {}
_failed: list[str] = []


def register(
    kind: str,
    name: str,
    target: object,
    *,
    flags: object = None,
    package: tuple[str, str] | None = None,
    when: tuple[str, ...] = (),
) -> None:
    """Register a part; see :class:`Part` for the arguments.

    Raises:
        RegistryError: There is no such kind, or the name is taken by another part.
    """
    if kind not in KINDS:
        raise RegistryError(f"{kind!r} is not a kind of part; the kinds are {', '.join(KINDS)}")
    other = _parts.get((kind, name))
    if other is not None and _place(other.target) != _place(target):
        raise RegistryError(
            f"the {kind} {name!r} is registered twice: {_place(other.target)} and {_place(target)}"
        )
    _parts[kind, name] = Part(kind, name, target, flags, package, when)
    sections.cache_clear()


def parts(kind: str) -> dict[str, Part]:
    """Return the parts of a kind by their names, slime's own first. None of their code is
    imported.
    """
    _discover()
    return {part.name: part for part in _parts.values() if part.kind == kind}


def find(kind: str, name: str) -> Any:
    """Import the part of this name and return it.

    Raises:
        RegistryError: There is none.
    """
    known = parts(kind)
    if name not in known:
        failed = "".join(f"; {problem}" for problem in _failed)
        raise RegistryError(f"there is no {kind} {name!r}; known are {', '.join(known)}{failed}")
    return load(known[name].target)


def called_for(kind: str, args: object) -> list[Any]:
    """Import the parts of a kind whose :attr:`Part.when` holds, and return them."""
    return [find(kind, name) for name in names_called_for(kind, args)]


def names_called_for(kind: str, args: object) -> list[str]:
    """Return the names of the parts of a kind whose :attr:`Part.when` holds."""

    def holds(condition: str) -> bool:
        name, _, value = condition.partition("=")
        return bool(getattr(args, name)) if not value else getattr(args, name) == value

    known = parts(kind).values()
    return [part.name for part in known if not part.when or any(map(holds, part.when))]


@functools.cache
def sections() -> tuple[type, ...]:
    """Return the dataclasses whose fields are the flags of parts, without duplicates."""
    # Reading a command line asks for them two thousand times.
    _discover()
    return tuple(
        dict.fromkeys(load(part.flags) for part in _parts.values() if part.flags is not None)
    )


def failures() -> list[str]:
    """Return one line for each other package whose parts could not be registered."""
    _discover()
    return list(_failed)


def _place(target: object) -> str:
    """Return ``package.module:name`` also of an object, so that a cell of a notebook can be run
    again.
    """
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', repr(target))}"


def load(target: object) -> Any:
    """Return the object of a place (``package.module:name``), the path of a table
    (``package:name.json``), or the object itself.
    """
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    if name.endswith(".json"):
        return Path(str(files(module))) / name
    return getattr(importlib.import_module(module), name)


@functools.cache
def _discover() -> None:
    import slime.plugins

    for kind, name, target in _CORE:
        register(kind, name, target, package=_PACKAGES.get(name))
    for found in pkgutil.iter_modules(slime.plugins.__path__, f"{slime.plugins.__name__}."):
        importlib.import_module(found.name).parts()
    _failed.extend(_register_others())


def _register_others() -> Iterator[str]:
    for point in entry_points(group=GROUP):
        before = dict(_parts)
        try:
            point.load()()
            # What every command line reads is loaded here, so that it fails for this package alone.
            for part in [part for key, part in _parts.items() if key not in before]:
                if part.flags is not None:
                    dataclasses.fields(load(part.flags))
                if part.kind in ("algorithm", "command"):
                    load(part.target)
        # the code of another package can raise anything, and must not end every command
        except Exception as error:
            _parts.clear()
            _parts.update(before)
            sections.cache_clear()
            package = point.dist.name if point.dist is not None else point.value
            yield (
                f"the package {package} cannot register its parts ({point.value}: "
                f"{type(error).__name__}: {error}); mend or uninstall it"
            )


_CORE = (
    ("algorithm", "grpo", "slime.algorithms.grpo:Grpo"),
    ("algorithm", "gspo", "slime.algorithms.grpo:Gspo"),
    ("algorithm", "cispo", "slime.algorithms.grpo:Cispo"),
    ("algorithm", "rloo", "slime.algorithms.grpo:Rloo"),
    ("algorithm", "dr_grpo", "slime.algorithms.dr_grpo:DrGrpo"),
    ("algorithm", "reinforce_plus_plus", "slime.algorithms.reinforce_plus_plus:ReinforcePlusPlus"),
    (
        "algorithm",
        "reinforce_plus_plus_baseline",
        "slime.algorithms.reinforce_plus_plus:ReinforcePlusPlusBaseline",
    ),
    ("algorithm", "ppo", "slime.algorithms.gae:Ppo"),
    ("backend", "fsdp", "slime.backends.fsdp.backend:FsdpBackend"),
    ("optimizer", "adam", "slime.backends.fsdp.optimizer:ScheduledAdamW"),
    ("tracker", "tensorboard", "slime.observability.trackers:TensorBoard"),
    ("transport", "nccl", "slime.weights.transports:DIRECT"),
    ("transport", "disk", "slime.weights.transports:DISK"),
    ("layer kind", "full_attention", "slime.models.layer_kinds:FULL_ATTENTION"),
    ("layer kind", "sliding_window", "slime.models.layer_kinds:SLIDING_WINDOW"),
    ("layer kind", "attention_sinks", "slime.models.layer_kinds:ATTENTION_SINKS"),
    ("layer kind", "soft_cap", "slime.models.layer_kinds:SOFT_CAP"),
    ("layer kind", "gated_delta_net", "slime.models.layer_kinds:GATED_DELTA_NET"),
    ("layer kind", "short_convolution", "slime.models.layer_kinds:SHORT_CONVOLUTION"),
    ("layer kind", "mamba2", "slime.models.layer_kinds:MAMBA2"),
    ("layer kind", "no_mixing", "slime.models.layer_kinds:NO_MIXING"),
    ("layer kind", "sparse_indexer", "slime.models.layer_kinds:SPARSE_INDEXER"),
    ("layer kind", "chunked_attention", "slime.models.layer_kinds:CHUNKED_ATTENTION"),
    ("layer kind", "temperature_tuning", "slime.models.layer_kinds:TEMPERATURE_TUNING"),
)

_PACKAGES = {"tensorboard": ("tensorboard", "tensorboard")}
