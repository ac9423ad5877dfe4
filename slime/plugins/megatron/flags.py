"""Megatron's flags with its backend: which ones are read, which ones have no effect, which ones are
refused, and which exclude or need each other; and what the backend cannot train.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.files import read_json, read_yaml
from slime.config.hf_config import SHAPE, model_config, read_config
from slime.config.layout import ParallelLayout
from slime.config.passthrough import by_name
from slime.config.rules import RuleSet, Run
from slime.config.run import other_folder
from slime.config.settings import no_effect_notice
from slime.plugins.megatron import OPTIONS
from slime.plugins.megatron.layout import chunk_problems, shape_problems

if TYPE_CHECKING:
    from slime.config.args import Args


_TABLE = read_json(Path(__file__).with_name("flags.json"))
ARCHITECTURE = frozenset(_TABLE["architecture"])
"""Flags that describe the model. FSDP takes all of this from the checkpoint's code and config.json."""
READ_BY_SLIME = frozenset(_TABLE["read"])
"""Flags that the Megatron backend reads itself, or that repeat values of config.json."""
WITHOUT_EFFECT = frozenset(_TABLE["without_effect"])
"""Flags that choose between equivalent kernels, or that concern what slime decides itself. The
results do not depend on them."""
PERFORMANCE: dict[str, str] = _TABLE["performance"]
"""Flags that change speed or memory and no result, and what the Megatron backend does instead. A
notice says so.
"""
REFUSED: dict[str, str] = _TABLE["refused"]
"""Flags that the Megatron backend cannot support, with the reasons."""


def resolve(args: Args) -> list[str]:
    """Remove MODEL_ARGS that describe another model than the checkpoint that the ``--override``
    file names.

    Such a file scales a recipe to a smaller model, while the recipe's script still passes the shape
    of the larger one. Its config.json is used instead.
    """
    if args.override is None:
        return []
    names = {str(key).replace("-", "_") for key in read_yaml(args.override, "--override")[0]}
    differences = shape_problems(args.megatron, args.hf_checkpoint)
    if "hf_checkpoint" in names and differences:
        args.notices.append(
            "MODEL_ARGS describe another model than hf_checkpoint of the --override file "
            f"({len(differences)} differences): the config.json of this checkpoint is used instead"
        )
        for name in (*SHAPE, *ARCHITECTURE, "untie_embeddings_and_output_weights"):
            args.megatron.pop(name, None)
    return []


def check(run: Run) -> list[str]:
    """Return the problems of Megatron's flags and of adapters on its layers, and add the notices."""
    args = run.args
    given = args.megatron
    problems = shape_problems(given, args.hf_checkpoint)
    if args.train_backend != "megatron":
        args.notices.extend(other_backend_notices(given, args.train_backend))
        return problems
    args.notices.extend([*shadowing_notices(), *no_effect_notice(idle_megatron_flags(given))])
    problems += [*refused_flags(given), *chunk_problems(given, args.hf_checkpoint)]
    if args.lora_rank:
        problems += adapter_problems(
            model_config(args.hf_checkpoint), int(given.get("tensor_model_parallel_size") or 1)
        )
    return problems


def fields_by_dest() -> dict[str, str]:
    """Map attributes of Megatron-LM to config fields of megatron-core where the names differ."""
    return {
        entry["dest"]: entry["field"] for entry in OPTIONS.entries().values() if "field" in entry
    }


def other_backend_notices(given: Mapping[str, Any], backend: str) -> list[str]:
    """Name the flags that have no effect with another backend in one notice."""
    # FSDP reads the shape from config.json, which is compared with these flags.
    known = {*SHAPE, *ARCHITECTURE, *_TABLE["understood_by_fsdp"]}
    defaults = {name: entry.flag.default for name, entry in by_name("megatron").items()}
    # what FSDP does anyway needs no notice
    as_usual = {**defaults, "attention_dropout": 0, "hidden_dropout": 0}
    idle = [name for name, value in given.items() if name not in known and value != as_usual[name]]
    if not idle:
        return []
    shown = ", ".join("--" + name.replace("_", "-") for name in sorted(idle))
    return [f"these Megatron flags have no effect with --train-backend {backend}: {shown}"]


def idle_megatron_flags(given: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the given flags of :data:`PERFORMANCE`, each with what happens instead."""
    return [
        (f"--{name.replace('_', '-')}", instead)
        for name, instead in PERFORMANCE.items()
        if given.get(name) not in (None, False, "none")
    ]


def refused_flags(given: dict[str, Any]) -> list[str]:
    """Report given flags that the Megatron backend cannot support or does not read."""
    problems = [
        f"--{name.replace('_', '-')} {given[name]} is not supported by --train-backend megatron: "
        f"{why}"
        for name, why in REFUSED.items()
        if given.get(name) not in (None, False, 0, 0.0, "none")
    ]
    # The layers follow from config.json. A spec of the user would be ignored in silence.
    other = [name for name in given.get("spec") or [] if name not in _TABLE["specs"]]
    if other:
        problems.append(
            f"--spec {' '.join(other)}: slime supports only its built-in layers; leave it out"
        )
    known = READ_BY_SLIME | WITHOUT_EFFECT | set(PERFORMANCE) | set(REFUSED) | set(fields_by_dest())
    problems += [
        f"--{name.replace('_', '-')}: --train-backend megatron does not read it; leave it out"
        for name in given
        if name not in known
    ]
    return problems


def adapter_problems(config: Mapping[str, Any], tensor_parallel: int) -> list[str]:
    """Return why the model of a config.json cannot have adapters on Megatron's layers; nothing if
    it can.
    """
    problems = []
    if config.get("kv_lora_rank"):
        problems.append(
            "--lora-rank: the projections of latent attention (kv_lora_rank in config.json) have "
            "no adapters with --train-backend megatron: use fsdp"
        )
    if config.get("model_type") == "phi3":
        problems.append(
            "--lora-rank: the projection of query, key and value in one matrix (phi3) has no "
            "adapter with --train-backend megatron: use fsdp"
        )
    groups = config.get("num_key_value_heads") or config.get("num_attention_heads")
    if groups and tensor_parallel > groups:
        problems.append(
            f"--lora-rank: {tensor_parallel} tensor-parallel ranks cannot share the adapters of "
            f"{groups} key-value heads: lower --tensor-model-parallel-size"
        )
    return problems


def check_family(args: Args) -> list[str]:
    """Report a model that has no weight map for Megatron, or a vision part. The config.json is read
    only if it is on this machine."""
    config = read_config(args.hf_checkpoint) if args.hf_checkpoint else None
    if args.train_backend != "megatron" or args.debug_rollout_only or config is None:
        return []
    from slime.plugins.megatron.maps.family import get_family, not_divided

    try:
        family = get_family(str(config.get("model_type")), args.model_name)
    except ValueError as error:
        return [f"--hf-checkpoint {args.hf_checkpoint}: {error}"]
    if "vision_config" in config and family.text_prefix is None:
        return [f"--hf-checkpoint {args.hf_checkpoint} has a vision part: use --train-backend fsdp"]
    problem = not_divided(config, ParallelLayout.from_args(args))
    return [problem] if problem else []


def check_megatron_lm(args: Args) -> list[str]:
    """Check that the checkpoints of Megatron-LM have all tensors of the model, in the shapes of
    ``--hf-checkpoint``.
    """
    from slime.models.shards import ModelError

    named = {
        "--load": (args.load, args.ckpt_step),
        "--ref-load": (args.ref_load, args.ref_ckpt_step),
    }
    named["--opd-teacher-load"] = (args.opd_teacher_load, None)
    folders = {
        option: str(folder)
        for option, (path, step) in named.items()
        if (folder := other_folder(path, step))
    }
    if not folders or args.debug_rollout_only:
        return []
    if args.lora_rank:
        return [
            f"{option} {path}: --lora-rank needs a base with a Hugging Face folder, but "
            "Megatron-LM wrote this one: convert it with tools/convert_torch_dist_to_hf.py and "
            "pass the result as --hf-checkpoint"
            for option, path in folders.items()
        ]
    if "--load" in folders:
        args.notices.append(
            f"--load {folders['--load']}: only the weights are read from this checkpoint of "
            "Megatron-LM. Its optimizer, random states and position in the data are not, so the "
            "run starts with its first rollout"
        )
    if args.hf_checkpoint is None or read_config(args.hf_checkpoint) is None:
        return []  # a hub id that is not here yet: the trainer compares them
    from slime.plugins.megatron.megatron_lm import differing_shapes, open_megatron_lm

    problems = []
    for option, path in folders.items():
        try:
            weights = open_megatron_lm(
                path, args.hf_checkpoint, args.model_name, args.trust_remote_code
            )
            problems += [
                f"{option}: {text}" for text in differing_shapes(weights, args.hf_checkpoint)
            ]
        except ModelError as error:
            problems.append(f"{option}: {error}")
    return problems


def installed_core() -> Path | None:
    """Return the folder that contains the ``megatron`` package of the installed megatron-core
    distribution.

    It is None if no distribution lists the files of ``megatron/core``: megatron-core is not
    installed, or installed in editable mode.
    """
    for distribution in importlib.metadata.distributions(name="megatron-core"):
        if "megatron/core/__init__.py" in (distribution.read_text("RECORD") or ""):
            return Path(str(distribution.locate_file(""))).resolve()
    return None


def shadowing_paths() -> list[str]:
    """Return the entries of ``sys.path`` whose ``megatron.core`` would be imported instead of the
    installed one.
    """
    installed = installed_core()
    found = []
    is_before = True
    for entry in sys.path if installed else []:
        folder = Path(entry or ".").resolve()
        if folder == installed:
            is_before = False
        elif (folder / "megatron" / "__init__.py").is_file():
            # Python prefers a regular package to namespace packages, wherever it is on the path.
            found.append(entry)
        elif is_before and (folder / "megatron" / "core").is_dir():
            found.append(entry)
    return found


def prefer_installed_core() -> list[str]:
    """Make ``import megatron.core`` find the installed distribution, and return the paths that
    shadowed it.

    A checkout whose ``megatron`` is a namespace package moves to the end of ``sys.path``, so that
    ``megatron.training`` can still be imported from it. One whose ``megatron`` is a regular package
    is removed.
    """
    shadowing = shadowing_paths()
    for entry in shadowing:
        sys.path.remove(entry)
        if not (Path(entry or ".") / "megatron" / "__init__.py").is_file():
            sys.path.append(entry)
    return shadowing


def shadowing_notices() -> list[str]:
    """Return a notice about :func:`shadowing_paths`, if there are any."""
    paths = shadowing_paths()
    if not paths:
        return []
    version = importlib.metadata.version("megatron-core")
    return [
        f"{', '.join(paths)} on PYTHONPATH contains its own megatron.core, which slime does not "
        f"use: it imports the installed megatron-core {version}, with which it is tested"
    ]


def _decay_changes(run: Run) -> bool:
    both = [run.args.megatron.get(f"{name}_weight_decay") for name in ("start", "end")]
    start, end = (run.args.weight_decay if value is None else value for value in both)
    return bool(start != end)


RULES = RuleSet(
    Path(__file__).with_name("rules.json"),
    {"a weight decay that changes": _decay_changes},
    (check,),
)
