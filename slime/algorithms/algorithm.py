"""The interface of estimators, both built-in and custom.

``--advantage-estimator`` names a class that derives from :class:`Algorithm`: a class by its name in
:mod:`slime.registry`, or a custom class by its path, for example ``my_algo.py:MyAlgorithm``.
Everything that a run does differently for an estimator is defined in its class, so that it cannot
be forgotten elsewhere.

The classes are imported when the command line is checked. At that time torch may be missing, and
importing it would take seconds. So the files of the built-in estimators import torch only inside
the functions that need it.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from .sequences import Reduce, Reducer


@dataclass(frozen=True)
class EstimatorSettings:
    """The flags that an estimator reads."""

    eps_clip: float = 0.2
    """``--eps-clip``: the ratio is clipped to [1 − eps_clip, 1 + eps_clip_high]."""
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None
    """``--eps-clip-c``: the constant of the dual clip; None for no dual clip."""
    gamma: float = 1.0
    lambd: float = 1.0
    kl_coef: float = 0.0
    """``--kl-coef``: the weight of the KL to the reference model in the reward."""
    std_normalization: bool = True
    """False with ``--disable-grpo-std-normalization``."""
    reward_weights: Mapping[str, float] | None = None
    """``--reward-weights``; None: each of several rewards has the weight 1."""
    max_response_len: int = 1024
    """``--rollout-max-response-len``, in tokens."""
    custom: Mapping[str, Any] = field(default_factory=dict)
    """The values that ``--custom-config-path`` sets for names that are not flags of slime."""
    own: object = None
    """The flags that the estimator brings itself, as an object of their dataclass."""


class Entries(Protocol):
    """The view of a rank batch for estimators: a mapping from the names on the batch page of the
    documentation.
    """

    def __getitem__(self, name: str, /) -> Any: ...

    def get(self, name: str, /) -> Any:
        """Return an entry, or None if the batch does not have it."""


class Row(NamedTuple):
    """The estimator's row in the documentation, in Markdown."""

    advantage: str
    loss: str
    flags: str
    source: str


class Scored(NamedTuple):
    """The reward of one rollout, for :meth:`Algorithm.batch_baseline`."""

    group: Hashable
    """Rollouts of the same prompt have the same key."""
    reward: float
    parts: Mapping[str, float]
    """Several rewards by name, where the reward function returned a dict; else empty."""
    metadata: Mapping[str, Any] = {}
    """The metadata of its first sample."""


class Algorithm(ABC):
    """Baseline, advantages, importance ratio and policy loss of one estimator.

    A class must define :meth:`group_baseline` and :meth:`advantages`, or inherit them from a
    built-in estimator. They have no default, because a class that uses raw rewards by mistake would
    train without an error, but badly. Ratio, loss and reduction are those of PPO unless the class
    overrides them.
    """

    needs_critic: ClassVar[bool] = False
    """Whether the run trains a critic, whose ``values`` are in the batch."""
    needs_group: ClassVar[bool] = True
    """Whether the baseline compares the samples of one prompt. With a single sample, every
    advantage would be 0.
    """
    needs_old_log_probs: ClassVar[bool] = False
    """Whether the trainer recomputes log π_old even if a rollout has a single optimizer step.
    Otherwise the current log-probs are used in that case, which gives the same gradient for a ratio
    per token and saves a forward pass."""
    needs_squared_probs: ClassVar[bool] = False
    """Whether the batch must have ``squared_probs``, which takes one more forward pass."""
    discounts: ClassVar[bool] = False
    """Whether :meth:`advantages` discounts later rewards by ``--gamma``."""
    uses_kl_in_reward: ClassVar[bool] = False
    """Whether :meth:`advantages` uses the values of ``batch["kl"]``, so that ``--kl-coef`` has an
    effect.
    """
    zero_advantage_has_no_gradient: ClassVar[bool] = True
    """Whether a sample whose advantages are all 0 has a gradient of exactly 0, so that training may
    skip it. A class that overrides the loss or the reduction must set this itself; otherwise all of
    its samples are trained."""
    requires: ClassVar[Mapping[str, str]] = {}
    """Switches that must be on, by attribute name, each with the reason."""
    forbids: ClassVar[Mapping[str, str]] = {}
    """Switches that must be off, by attribute name, each with the reason."""
    row: ClassVar[Row | None] = None
    """Only for built-in estimators."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # This must not be inherited if the loss is overridden, which may have a term that does not
        # depend on the advantage and so has a gradient.
        changes_loss = vars(cls).keys() & {"policy_loss", "sequence_loss", "pg_reducer"}
        if changes_loss and "zero_advantage_has_no_gradient" not in vars(cls):
            cls.zero_advantage_has_no_gradient = False

    def __init__(self, settings: EstimatorSettings) -> None:
        self.settings = settings

    @abstractmethod
    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        """Subtract the group's baseline from the rewards of one prompt's samples.

        This is called for whole groups, before the rollout is divided among the training ranks, in
        a process that may not have torch. :meth:`advantages` gets the result as
        ``batch["rewards"]``. Equal rewards should give exactly 0, so that training can skip their
        group.

        Returns:
            One number per reward, in the same order.
        """

    def batch_baseline(self, rollouts: Sequence[Scored]) -> Sequence[float] | None:
        """Do what :meth:`group_baseline` does for all rollouts of a batch at once, from which it
        differs in what it knows: several rewards of each rollout, and other groups.

        Returns:
            One number per rollout, in the same order. None (the default): each group has its own
            :meth:`group_baseline`.
        """
        return None

    @abstractmethod
    def advantages(self, batch: Entries) -> tuple[list[Tensor], list[Tensor]]:
        """Return advantages and returns, each ``[response_length]`` per sample.

        Args:
            batch: The rank batch over whole responses: ``rewards`` (one float per sample), ``kl``,
                ``loss_masks`` and, with a critic, ``values`` (each ``[response_length]`` per
                sample), ``response_lengths`` and ``total_lengths``.
        """

    def over_ranks(self, batch: Entries, advantages: list[Tensor], reduce: Reduce) -> list[Tensor]:
        """Return the advantages after what depends on all samples of the rollout, whose sums over
        ranks ``reduce.over_data`` has. Here they stay as they are.
        """
        return advantages

    def of_samples(self, entries: Mapping[str, Sequence[Any]]) -> Algorithm:
        """Return the estimator for the loss of one micro-batch, whose methods are :meth:`ppo_kl`,
        :meth:`sequence_loss` and :meth:`pg_reducer`: itself, unless they read more of the samples
        than their arguments.

        Args:
            entries: The entries of the batch for these samples, by their documented names.
        """
        return self

    def ppo_kl(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        reduce: Reduce,
    ) -> Tensor:
        """Return log π_old − log π_θ, from which the ratio ρ = exp(−ppo_kl) is computed; here for
        each token.

        Args:
            log_probs, old_log_probs, mask: Flat ``[R]``, the response tokens of all samples.
            lengths: The number of tokens of each sample.
            reduce: Sums over the ranks that hold other tokens of the same responses (context
                parallelism).
        """
        return old_log_probs - log_probs

    def policy_loss(
        self, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return loss and clipfrac (1 where the clip took effect) per token, ``[R]``; here PPO's
        clipped surrogate.
        """
        from .losses import compute_policy_loss

        clip = self.settings
        return compute_policy_loss(
            ppo_kl, advantages, clip.eps_clip, clip.eps_clip_high, clip.eps_clip_c
        )

    def sequence_loss(
        self,
        ppo_kl: Tensor,
        log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        reduce: Reduce,
    ) -> tuple[Tensor, Tensor]:
        """Return what :meth:`policy_loss` does, and what the default calls, for losses of whole
        sequences. The further arguments are those of :meth:`ppo_kl`.
        """
        return self.policy_loss(ppo_kl, log_probs, advantages)

    def pg_reducer(self, mask: Tensor, default: Reducer) -> Reducer:
        """Return the function that reduces the policy loss ``[R]`` to a scalar.

        Args:
            mask: ``[R]``, 0 for tokens that are not trained.
            default: The reduction of the run.
        """
        return default

    def notices(self) -> list[str]:
        """Return notices for the user about these settings. They do not prevent the run."""
        return []


def custom_setting(args: object, name: str, default: object) -> Any:
    """Return a value that ``--custom-config-path`` may set on ``args``, or ``default`` if it is
    absent or null.

    Attribute access would not work, because ``args`` raises an error for a name that is not
    declared.
    """
    value = vars(args).get(name)
    return default if value is None else value


def class_problem(found: object) -> str | None:
    """Return why an object cannot be used as an estimator, or None if it can."""
    if not inspect.isclass(found):
        return (
            f"it is a {type(found).__name__}, not a class that derives from "
            "slime.algorithms.Algorithm"
        )
    if not issubclass(found, Algorithm):
        return f"class {found.__name__} does not derive from slime.algorithms.Algorithm"
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        return f"class {found.__name__} does not define {' and '.join(missing)}"
    for name, method in inspect.getmembers(Algorithm, inspect.isfunction):
        if name.startswith("_"):
            continue
        own = inspect.signature(getattr(found, name))
        try:
            own.bind(*inspect.signature(method).parameters)
        except TypeError as error:
            return (
                f"{found.__name__}.{name}{own} cannot be called as "
                f"{name}{inspect.signature(method)}: {error}"
            )
    return None


def baseline_problem(algorithm: Algorithm) -> str | None:
    """Try the baseline on small groups, before a run starts, and return what is wrong with it, or
    None.
    """
    for rewards in ([0.0, 1.0, 0.5], [1.0, 1.0], [0.0, 0.0], [-1.0, 2.0]):
        try:
            subtract_baseline(algorithm, rewards)
        except Exception as error:  # custom code may raise any exception
            return f"group_baseline({rewards}) failed: {type(error).__name__}: {error}"
    return None


def subtract_baseline(algorithm: Algorithm, rewards: Sequence[float]) -> list[float]:
    """Call :meth:`Algorithm.group_baseline` and check its result.

    Raises:
        ValueError: The result is not one finite number per reward.
    """
    name = f"{type(algorithm).__name__}.group_baseline"
    return checked_numbers(
        f"{name}({list(rewards)})", algorithm.group_baseline(rewards), len(rewards)
    )


def checked_numbers(name: str, values: Iterable[float], count: int) -> list[float]:
    """Return what a method of an estimator gave for ``count`` rewards as floats.

    Raises:
        ValueError: It is not one finite number per reward.
    """
    result = [float(x) for x in values]
    if len(result) != count or not all(map(math.isfinite, result)):
        raise ValueError(
            f"{name} returned {result}, but it must return one finite number per reward"
        )
    return result
