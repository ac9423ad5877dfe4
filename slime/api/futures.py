"""What the calls of a session return, and the losses that are functions of log-probs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from slime.cluster.actors import Ref, door
from slime.data.datum import Datum

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
LossFunction = Callable[[Sequence[Datum], list["Tensor"]], "tuple[Tensor, Mapping[str, float]]"]
"""A loss of the program: it gets the data and, for each datum, the log-probs of its scored tokens,
float32 with gradient; it returns the loss, a scalar, and metrics."""


class Refused(ValueError):
    """A call that a session does not do; the session can go on."""


class Waits(Protocol):
    """Waits for calls of actors."""

    def wait(self, refs: Sequence[Ref[Any]]) -> list[Any]: ...


class Future(Generic[T]):
    """The result of a call that has been started. Calls that train run in the order in which they
    were made; responses are generated at the same time.
    """

    def __init__(
        self, session: Waits, refs: Sequence[Ref[Any]], read: Callable[[list[Any]], T]
    ) -> None:
        self._session = session
        self.refs = refs
        self.read = read

    def done(self) -> bool:
        """Whether :meth:`result` returns at once."""
        return len(door().wait(self.refs, 0)[0]) == len(self.refs)

    def result(self) -> T:
        """Wait for the result.

        Raises:
            ValueError: The call was wrong; the session can go on.
            KeyboardInterrupt: Ctrl-C; the session can go on, and so does the call.
        """
        return self.read(self._session.wait(self.refs))


class ForwardBackward(tuple[dict[str, float], "list[Tensor]"]):
    """The result of :meth:`Session.forward_backward`."""

    @property
    def metrics(self) -> dict[str, float]:
        """The loss and the metrics of the call."""
        return self[0]

    @property
    def log_probs(self) -> list[Tensor]:
        """For each datum, the log-probs of its scored tokens before the step, float32."""
        return self[1]


def dpo(beta: float = 0.1) -> LossFunction:
    """Return the loss of direct preference optimization, −log σ(β (Δ₊ − Δ₋)), a mean over pairs.

    Δ is the sum over the scored tokens of log π − log π_ref, each multiplied by its weight. Source:
    Rafailov et al., "Direct Preference Optimization" (2023), eq. 7.

    Data come in pairs, the preferred one first. Their ``log_probs`` are those of the reference.
    """

    def loss(data: Sequence[Datum], log_probs: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
        import torch
        from torch.nn.functional import logsigmoid

        if len(data) % 2 or any(datum.log_probs is None for datum in data):
            raise Refused("dpo takes pairs of data, each with the log_probs of the reference")
        gains = torch.stack(
            [
                (
                    (x - torch.tensor(d.log_probs)) * torch.tensor(d.weights or [1.0] * d.length)
                ).sum()
                for d, x in zip(data, log_probs, strict=True)
            ]
        )
        margins = beta * (gains[0::2] - gains[1::2])
        metrics = {
            "accuracy": float((margins > 0).float().mean()),
            "margin": float(margins.detach().mean()),
        }
        return -logsigmoid(margins).mean(), metrics

    return loss
