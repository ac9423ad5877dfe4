"""Class-style reward models: ``__init__(self, model_path)``, ``compute_reward(self, prompts, responses) -> list``.

``--custom-rm-path`` may name such a class; it gets ``--rm-model-path`` or nothing. The model lives in a
process of its own, made once per run, and works on a batch (a group of samples) at a time: it never
shares the interpreter with the rollout, and one that hangs is killed and made anew. ``compute_reward``
may also take ``labels`` and ``metadata`` (lists as long as ``prompts``).
"""

from __future__ import annotations

import atexit
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from slime.config.hooks import load_function
from slime.data.sample import Message, Sample
from slime.rollout.hooks import supported_kwargs
from slime.rollout.rm_hub.outcome import mark_unscored
from slime.rollout.verifier import VerifierPool
from slime.types import JsonObject, JsonValue

if TYPE_CHECKING:
    from slime.config.args import Args

_WORKER = "slime.rollout.rm_hub.model_rm"
DEFAULT_CLASS = "CustomRewardModel"  # what a bare file means
_pools: dict[tuple[str, str | None], VerifierPool] = {}  # of this process: one model process each
_models: dict[tuple[str, str | None], Any] = {}  # in a model's process


def is_model_class(function: object) -> TypeGuard[type]:
    """Whether what ``--custom-rm-path`` names is a class-style reward model."""
    return inspect.isclass(function)


async def model_rewards(args: Args, path: str, model_class: type, samples: Sequence[Sample]) -> list[Any] | None:
    """One call of ``compute_reward`` for all samples, in their order; None (and the samples marked) without an answer.

    Raises:
        TypeError: the class has no ``compute_reward``.
        ValueError: it wants a model path, and there is none.
        RuntimeError: the model could not be made, or ``compute_reward`` raised.
    """
    model_path = args.rm_model_path
    check_class(model_class, model_path)
    columns = [
        [sample.prompt for sample in samples],
        [sample.response for sample in samples],
        [sample.label for sample in samples],
        [sample.metadata for sample in samples],
    ]
    setup = (f"{_WORKER}:load", path, model_path)
    run = _pool(path, model_path).run
    verdict = await run(f"{_WORKER}:compute", path, model_path, *columns, timeout=args.reward_timeout, setup=setup)
    if verdict.ok:
        assert isinstance(verdict.value, list), "compute() returns a list"
        return verdict.value
    if verdict.status == "error":
        raise RuntimeError(f"reward model {path}: {verdict.detail}")
    for sample in samples:
        mark_unscored(sample, verdict.status, f"{path}: {verdict.detail}")
    return None


def check_class(model_class: type, model_path: str | None) -> None:
    """Whether the class can be made and called; see :func:`model_rewards` for what it raises."""
    if not callable(getattr(model_class, "compute_reward", None)):
        raise TypeError(f"reward model class {model_class.__name__} has no compute_reward(prompts, responses)")
    required = [
        name
        for name, parameter in inspect.signature(model_class).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if model_path is None and required:
        raise ValueError(
            f"reward model class {model_class.__name__} wants {', '.join(required)}: give --rm-model-path, the folder "
            "or name that its __init__ loads"
        )


def _pool(path: str, model_path: str | None) -> VerifierPool:
    key = (path, model_path)
    if key not in _pools:
        _pools[key] = VerifierPool(1, memory_bytes=0)  # a model may be larger than a verifier
        atexit.register(_pools[key].close)
    return _pools[key]


# --- in the model's process ------------------------------------------------------------------


def load(path: str, model_path: str | None) -> None:
    """Make the model, once per process."""
    if (path, model_path) not in _models:
        model_class = load_function(path, DEFAULT_CLASS)
        takes_path = model_path is not None and bool(inspect.signature(model_class).parameters)
        _models[path, model_path] = model_class(model_path) if takes_path else model_class()


def compute(
    path: str,
    model_path: str | None,
    prompts: list[str | list[Message]],
    responses: list[str],
    labels: list[JsonValue],
    metadata: list[JsonObject],
) -> list[Any]:
    """Rewards of one batch, as floats or dicts."""
    load(path, model_path)
    function = _models[path, model_path].compute_reward
    rewards = function(prompts, responses, **supported_kwargs(function, labels=labels, metadata=metadata))
    if inspect.isawaitable(rewards):
        import asyncio

        rewards = asyncio.run(asyncio.wait_for(rewards, None))
    return [dict(reward) if isinstance(reward, dict) else float(reward) for reward in rewards]
