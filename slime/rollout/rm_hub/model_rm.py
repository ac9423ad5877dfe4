"""Reward model classes: ``__init__(self, model_path)``, ``compute_reward(self, prompts, responses) -> list``.

``--custom-rm-path`` may name such a class. Its constructor gets ``--rm-model-path``, or nothing if it is not set.
``compute_reward`` may have the parameters ``labels`` and ``metadata`` as well (lists as long as ``prompts``).

The model is created once per run, in a process of its own, and scores a batch (the samples of a group) at a time. It
does not share an interpreter with the rollout, so it cannot block it, and if it hangs, its process is killed and
replaced.
"""

from __future__ import annotations

import atexit
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from slime.config.hooks import load_function
from slime.data.sample import Message, Sample
from slime.rollout.end_token import spoken
from slime.rollout.hooks import supported_kwargs
from slime.rollout.rm_hub.outcome import mark_unscored
from slime.rollout.verifier import VerifierPool
from slime.types import JsonObject, JsonValue

if TYPE_CHECKING:
    from slime.config.args import Args

_WORKER = "slime.rollout.rm_hub.model_rm"
DEFAULT_CLASS = "CustomRewardModel"  # the class if --custom-rm-path names only a file
_pools: dict[tuple[object, ...], VerifierPool] = {}  # used in the rollout's process: one worker process per model
_models: dict[tuple[str, str | None], Any] = {}  # used in the worker process


def is_model_class(function: object) -> TypeGuard[type]:
    """Whether the object that ``--custom-rm-path`` names is a reward model class."""
    return inspect.isclass(function)


async def model_rewards(args: Args, path: str, model_class: type, samples: Sequence[Sample]) -> list[Any] | None:
    """Score all samples with one call of ``compute_reward``.

    Returns:
        The rewards in the order of the samples. None if the call timed out or its process crashed; all samples are then
        marked as unscored.

    Raises:
        TypeError: The class has no method ``compute_reward``.
        ValueError: The class needs a model path, but ``--rm-model-path`` is not set.
        RuntimeError: The model could not be created, or ``compute_reward`` raised an exception.
    """
    model_path = args.rm_model_path
    check_class(model_class, model_path)
    columns = [
        [sample.prompt for sample in samples],
        [spoken(sample, args.hf_checkpoint, args.trust_remote_code).response for sample in samples],
        [sample.label for sample in samples],
        [sample.metadata for sample in samples],
    ]
    setup = (f"{_WORKER}:load", path, model_path)
    run = _pool(path, model_path, tuple(args.verifier_env or ())).run
    verdict = await run(f"{_WORKER}:compute", path, model_path, *columns, timeout=args.reward_timeout, setup=setup)
    if verdict.ok:
        assert isinstance(verdict.value, list), "compute() returns a list"
        return verdict.value
    if verdict.status == "error":
        raise RuntimeError(f"reward model {path} failed: {verdict.detail}")
    for sample in samples:
        mark_unscored(sample, verdict.status, f"{path}: {verdict.detail}")
    return None


def check_class(model_class: type, model_path: str | None) -> None:
    """Check that the class can be instantiated and called. The errors are those of :func:`model_rewards`."""
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
            f"reward model class {model_class.__name__} needs {', '.join(required)}: set --rm-model-path to the folder "
            "or name that its __init__ loads"
        )


def _pool(path: str, model_path: str | None, variables: tuple[str, ...]) -> VerifierPool:
    key = (path, model_path, variables)
    if key not in _pools:
        _pools[key] = VerifierPool(1, memory_bytes=0, variables=variables)  # a model needs more memory than a verifier
        atexit.register(_pools[key].close)
    return _pools[key]


# --- in the model's process ------------------------------------------------------------------


def load(path: str, model_path: str | None) -> None:
    """Create the model, once per process."""
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
    """Return the rewards of one batch, as floats or dicts."""
    load(path, model_path)
    function = _models[path, model_path].compute_reward
    rewards = function(prompts, responses, **supported_kwargs(function, labels=labels, metadata=metadata))
    if inspect.isawaitable(rewards):
        import asyncio

        rewards = asyncio.run(asyncio.wait_for(rewards, None))
    return [dict(reward) if isinstance(reward, dict) else float(reward) for reward in rewards]
