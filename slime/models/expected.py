"""What a model expects of its checkpoint, compared with what the files hold, before any value is
read.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from slime.models.shards import ModelError, shorten
from slime.models.stored import NamedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shape = tuple[int, ...]


class LoadingInfo(TypedDict):
    """What ``from_pretrained`` returns in addition to the model with ``output_loading_info``."""

    missing_keys: set[str]
    mismatched_keys: set[tuple[str, Shape, Shape]]
    """Name, shape in the checkpoint and shape in the model."""
    unexpected_keys: set[str]


_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.")


@dataclass
class Differences:
    """Differences between a checkpoint and a model, by the names of the tensors in the files."""

    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    """With both shapes, in words."""
    integers: list[str] = field(default_factory=list)
    """Not of a float type where the model computes with floats."""
    surplus_layers: list[str] = field(default_factory=list)
    """Of decoder layers beyond those that config.json counts, and not known leftovers."""
    unexpected: list[str] = field(default_factory=list)
    missing_buffers: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not (self.missing or self.mismatched or self.integers or self.surplus_layers)


def compare(model: PreTrainedModel, stored: NamedWeights) -> Differences:
    """Compare the names and shapes of a checkpoint with those of a model.

    The names are compared with those that ``save_pretrained`` would write. If they differ,
    transformers loads tensors without memory, which shows whether it knows the names (of older
    releases, or with another prefix).

    Args:
        model: The model of the checkpoint's config, on the ``meta`` device.
    """
    expected = expected_on_disk(model)
    differences = (
        _compare(model, stored, *expected) if expected is not None else Differences(missing=["?"])
    )
    if differences.missing or differences.mismatched:
        loaded = _dry_load(model, stored)
        if loaded is not None and (loaded.fits or expected is None):
            loaded.surplus_layers = differences.surplus_layers
            return loaded
    return differences


def expected_on_disk(model: PreTrainedModel) -> tuple[dict[str, Shape], set[str], set[str]] | None:
    """Return the tensors that a checkpoint of the model has; None if transformers cannot convert
    the names.

    Returns:
        ``{name: shape}``, the names of buffers, and the names of float tensors. Tied tensors have
        only the first of their names.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tied = getattr(model, "all_tied_weights_keys", None) or {}
    tensors = {
        name: torch.empty_like(t, device="meta")
        for name, t in model.state_dict().items()
        if name not in tied
    }
    buffers = {name for name, _ in model.named_buffers()}
    try:
        on_disk = revert_weight_conversion(model, dict(tensors))
        own = {name: t for name, t in tensors.items() if name in buffers}
        buffers = set(revert_weight_conversion(model, own)) if own else set()
    # some conversions of transformers cannot be reverted, or not for tensors without values
    except Exception:
        return None
    floats = {name for name, t in on_disk.items() if t.is_floating_point()}
    return {name: tuple(t.shape) for name, t in on_disk.items()}, buffers, floats


def _compare(
    model: PreTrainedModel,
    stored: NamedWeights,
    expected: Mapping[str, Shape],
    buffers: set[str],
    floats: set[str],
) -> Differences:
    shapes = stored.shapes()
    absent = [name for name in expected if name not in shapes]
    both = [name for name in expected if name in shapes]
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    known = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or []
    # Some models have tensors that their own code ignores in a checkpoint, or makes itself if they
    # are missing.
    beyond = [
        name
        for name in shapes
        if name not in expected
        and name not in tied
        and not any(re.search(pattern, name) for pattern in known)
    ]
    # More layers than config.json counts are an error and no leftover: the model would be cut off
    # without a word.
    surplus = _surplus_layers(model, expected, beyond)
    return Differences(
        missing=[
            n for n in absent if n not in buffers and not any(re.search(p, n) for p in optional)
        ],
        mismatched=[
            f"{name} has shape {list(shapes[name])} in {stored.where(name)}, but "
            f"{list(expected[name])} in the model"
            for name in both
            if shapes[name] != expected[name]
        ],
        integers=[
            f"{name} ({stored.dtype_of(name)} in {stored.where(name)})"
            for name in both
            if name in floats and not stored.is_float(name)
        ],
        surplus_layers=surplus,
        unexpected=[name for name in beyond if name not in surplus],
        missing_buffers=[name for name in absent if name in buffers],
    )


def _surplus_layers(
    model: PreTrainedModel, expected: Mapping[str, Shape], beyond: list[str]
) -> list[str]:
    """Return the names in ``beyond`` of decoder layers after the last one.

    Layers for multi-token prediction have such numbers as well, and are not returned.
    """
    counts: dict[str, int] = {}
    for found in filter(None, map(_LAYER.match, expected)):
        counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    config: Any = model.config
    extra = int(getattr(config.get_text_config(), "num_nextn_predict_layers", None) or 0)
    return [
        name
        for name in beyond
        if (match := _LAYER.match(name))
        and match[1] in counts
        and int(match[2]) >= counts[match[1]] + extra
    ]


def _dry_load(model: PreTrainedModel, stored: NamedWeights) -> Differences | None:
    """Let transformers load tensors without memory, and return the differences it finds; None if it
    fails.
    """
    # with output_loading_info it returns a pair, which its annotation leaves out
    architecture: Any = type(model)
    with quiet():
        try:
            _, info = architecture.from_pretrained(
                None,
                config=model.config,
                state_dict=stored.empty(),
                device_map={"": "meta"},
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except RuntimeError:  # tensors do not fit each other; the caller reports them by name
            return None
    return from_loading_info(model, info)


def from_loading_info(model: PreTrainedModel, info: LoadingInfo) -> Differences:
    """Convert the ``output_loading_info`` of transformers. The names are those of the model, not of
    the files.
    """
    buffers = {name for name, _ in model.named_buffers()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return Differences(
        missing=sorted(set(info["missing_keys"]) - buffers - tied),
        mismatched=[
            f"{name} has shape {list(theirs)}, but {list(own)} in the model"
            for name, theirs, own in sorted(info["mismatched_keys"])
        ],
        unexpected=sorted(info["unexpected_keys"]),
        missing_buffers=sorted(set(info["missing_keys"]) & buffers),
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the bar and the table of differences that transformers prints, because slime has a
    terminal output of its own and reports differences in one message.
    """
    loggers = [
        logging.getLogger(f"transformers.{name}")
        for name in ("modeling_utils", "core_model_loading", "distributed.tensor_parallel")
    ]
    levels = [logger.level for logger in loggers]
    from transformers.utils import logging as theirs

    bar = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bar:
            theirs.enable_progress_bar()


def require_fit(where: str, model: PreTrainedModel, differences: Differences) -> None:
    """Raise an error if a checkpoint does not fit the model.

    Raises:
        ModelError: The checkpoint lacks tensors of the model, or they do not fit. The message names
            them.
    """
    if differences.fits:
        return
    d = differences
    problems = []
    if d.missing:
        renamed = difflib.get_close_matches(d.missing[0], d.unexpected, n=1)
        instead = f" (it has {renamed[0]}, which the model does not have)" if renamed else ""
        problems.append(f"it lacks {len(d.missing)} tensors: {shorten(d.missing)}{instead}")
    if d.mismatched:
        problems.append(
            f"{len(d.mismatched)} tensors have another shape: {shorten(d.mismatched, 3)}"
        )
    if d.integers:
        problems.append(
            f"{len(d.integers)} tensors do not have a float dtype, and config.json has no "
            f"quantization_config for them: {shorten(d.integers, 3)}"
        )
    if d.surplus_layers:
        problems.append(f"it has layers beyond num_hidden_layers: {shorten(d.surplus_layers, 3)}")
    raise ModelError(
        f"checkpoint {where} does not fit {type(model).__name__} as its config.json describes it: "
        f"{'; '.join(problems)}. slime does not initialize such tensors at random: restore the "
        "files or correct config.json"
    )


def notices(differences: Differences) -> list[str]:
    """Return notices about a checkpoint that fits the model, without their subject, which is the
    checkpoint.
    """
    said = []
    if unused := differences.unexpected:
        said.append(f"has {len(unused)} tensors that the model does not use: {shorten(unused, 3)}")
    if missing := differences.missing_buffers:
        said.append(
            f"lacks {len(missing)} buffers, which keep their defaults: {shorten(missing, 3)}"
        )
    return said
