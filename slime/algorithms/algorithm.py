"""What an estimator is: the interface of the built-in ones and of a user's own.

``--advantage-estimator`` names a class that derives from :class:`Algorithm`: a built-in one by its name in
:mod:`.registry`, a user's own by its path, such as ``my_algo.py:MyAlgorithm``. Everything that the run does
differently for one estimator stands in its class, so nothing can be forgotten elsewhere.

The classes are read when the command line is checked, where torch may be missing and would take seconds to import.
Therefore the files of the built-in estimators import torch only inside the functions that call it.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from .reduce import Reduce
    from .reductions import Reducer


@dataclass(frozen=True)
class EstimatorSettings:
    """The flags that an estimator reads."""

    eps_clip: float = 0.2
    """``--eps-clip``: the ratio is clipped to [1 − eps_clip, 1 + eps_clip_high]."""
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None
    """``--eps-clip-c``: the constant of the dual clip; None switches it off."""
    gamma: float = 1.0
    lambd: float = 1.0
    kl_coef: float = 0.0
    """``--kl-coef``: weight of the KL to the reference in the reward."""
    std_normalization: bool = True
    """False with ``--disable-grpo-std-normalization``."""
    max_response_len: int = 1024
    """``--rollout-max-response-len``, in tokens."""
    custom: Mapping[str, Any] = field(default_factory=dict)
    """The names that ``--custom-config-path`` sets and that are no flags of slime."""


class Entries(Protocol):
    """A rank batch as an estimator reads it: a mapping from the names of the batch page of the documentation."""

    def __getitem__(self, name: str, /) -> Any: ...

    def get(self, name: str, /) -> Any:
        """None where the batch has no such entry."""


class Row(NamedTuple):
    """The estimator's row in the documentation, in Markdown."""

    advantage: str
    loss: str
    flags: str
    source: str


class Algorithm(ABC):
    """Baseline, advantages, importance ratio and policy loss of one estimator.

    A class must define :meth:`group_baseline` and :meth:`advantages`, or inherit them from a built-in estimator: a
    class that trained on raw rewards because nobody thought of a baseline would learn without an error, and badly.
    Ratio, loss and reduction are those of PPO unless the class defines its own.
    """

    needs_critic: ClassVar[bool] = False
    """The run trains a critic, and the batch has its ``old_values``."""
    needs_group: ClassVar[bool] = True
    """The baseline compares the samples of one prompt: with a single sample every advantage would be 0."""
    needs_old_log_probs: ClassVar[bool] = False
    """The trainer recomputes log π_old even where a rollout has a single optimizer step. Without it the current
    log-probs are used there, which gives the same gradient for a ratio per token and saves a forward pass."""
    uses_kl_in_reward: ClassVar[bool] = False
    """:meth:`advantages` reads ``batch["kl"]``, so ``--kl-coef`` has an effect."""
    zero_advantage_has_no_gradient: ClassVar[bool] = True
    """A sample whose advantages are all 0 has a gradient of exactly 0, so that training may leave it out. A class with
    a loss or a reduction of its own has to say so itself; otherwise all of its samples are trained."""
    requires: ClassVar[Mapping[str, str]] = {}
    """Switches that must be on, by attribute name, each with the reason."""
    forbids: ClassVar[Mapping[str, str]] = {}
    """Switches that must be off, by attribute name, each with the reason."""
    row: ClassVar[Row | None] = None
    """Only for built-in estimators."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # The property cannot be inherited along with another loss: a term without an advantage would have a gradient.
        changes_loss = "policy_loss" in vars(cls) or "pg_reducer" in vars(cls)
        if changes_loss and "zero_advantage_has_no_gradient" not in vars(cls):
            cls.zero_advantage_has_no_gradient = False

    def __init__(self, settings: EstimatorSettings) -> None:
        self.settings = settings

    @abstractmethod
    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        """The rewards of one prompt's samples, less the group's baseline; as many numbers, in the same order.

        It is called where whole groups are at hand, before the rollout is split over the training ranks, and without
        torch. The numbers arrive as ``batch["rewards"]`` in :meth:`advantages`. Equal rewards should give exactly 0,
        so that training can leave their group out.
        """

    @abstractmethod
    def advantages(self, batch: Entries) -> tuple[list[Tensor], list[Tensor]]:
        """Advantages and returns, per sample ``[response_length]``.

        Args:
            batch: the rank batch over whole responses: ``rewards`` (float per sample), ``kl``, ``loss_masks`` and,
                with a critic, ``old_values`` (each per sample ``[response_length]``), ``response_lengths``,
                ``total_lengths``.
        """

    def ppo_kl(
        self, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, lengths: Sequence[int], reduce: Reduce
    ) -> Tensor:
        """log π_old − log π_θ as the ratio ρ = exp(−ppo_kl) of this estimator sees it: each token's own.

        Args:
            log_probs, old_log_probs, mask: flat ``[R]``, the response tokens of all samples one after another.
            lengths: how many tokens belong to each sample.
            reduce: joins the shares of one response under context parallelism.
        """
        return old_log_probs - log_probs

    def policy_loss(self, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and clipfrac (1 where the clip took effect) per token, all ``[R]``: PPO's clipped surrogate."""
        from .policy_loss import compute_policy_loss

        clip = self.settings
        return compute_policy_loss(ppo_kl, advantages, clip.eps_clip, clip.eps_clip_high, clip.eps_clip_c)

    def pg_reducer(self, mask: Tensor, default: Reducer) -> Reducer:
        """What sums the policy loss ``[R]`` up to a scalar; ``default`` is the reduction of the run.

        Args:
            mask: ``[R]``; 0 for tokens that are not trained.
        """
        return default

    def notices(self) -> list[str]:
        """What a user of these settings should be told; the run starts all the same."""
        return []


def custom_setting(args: object, name: str, default: object) -> Any:
    """A name that ``--custom-config-path`` may set on ``args``; ``default`` where it is absent or null. An attribute
    access would not do: args raise on a name that no file has declared."""
    value = vars(args).get(name)
    return default if value is None else value


def class_problem(found: object) -> str | None:
    """Why an object cannot serve as an estimator; None where it can."""
    if not inspect.isclass(found):
        return f"it is a {type(found).__name__}, not a class that derives from slime.algorithms.Algorithm"
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
            return f"{found.__name__}.{name}{own} cannot be called as {name}{inspect.signature(method)}: {error}"
    return None


def baseline_problem(algorithm: Algorithm) -> str | None:
    """What is wrong with the baseline of a small group, which is tried before a run starts; None where nothing is."""
    for rewards in ([0.0, 1.0, 0.5], [1.0, 1.0], [0.0, 0.0], [-1.0, 2.0]):
        try:
            subtract_baseline(algorithm, rewards)
        except Exception as error:  # the user's code
            return f"group_baseline({rewards}) failed: {type(error).__name__}: {error}"
    return None


def subtract_baseline(algorithm: Algorithm, rewards: Sequence[float]) -> list[float]:
    """:meth:`Algorithm.group_baseline`, checked.

    Raises:
        ValueError: it does not return one finite number per reward.
    """
    result = [float(x) for x in algorithm.group_baseline(rewards)]
    if len(result) != len(rewards) or not all(map(math.isfinite, result)):
        raise ValueError(
            f"{type(algorithm).__name__}.group_baseline gave {result} for the rewards {list(rewards)}: it must return "
            "one finite number per reward"
        )
    return result
