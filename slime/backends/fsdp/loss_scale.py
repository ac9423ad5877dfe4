"""Loss scaling for training in float16 (``--fp16``).

Gradients below 6e-8 are 0 in float16. The loss of each micro-batch is multiplied by a scale, and the gradients are
divided by it in float32. If one of them overflows, the step is left out and the scale halved; after
``--loss-scale-window`` steps without an overflow it is doubled. Source: Micikevicius et al., Mixed Precision Training,
2018, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.args import Args


@dataclass
class LossScale:
    """The scale of the loss.

    Attributes:
        value: The current scale, a positive number.
        smallest: The scale is not lowered below this.
        window: Steps without an overflow after which the scale is doubled; None for a constant scale.
        passed: Steps since the last overflow or change.
    """

    value: float
    smallest: float
    window: int | None
    passed: int = 0

    @classmethod
    def from_args(cls, args: Args) -> LossScale | None:
        """Return the scale at the start of a run; None unless it trains in float16."""
        if args.train_dtype != "float16":
            return None
        if args.loss_scale is not None:
            return cls(args.loss_scale, args.loss_scale, None)
        return cls(args.initial_loss_scale, args.min_loss_scale, args.loss_scale_window)

    @property
    def can_be_lowered(self) -> bool:
        return self.window is not None and self.value > self.smallest

    def note_overflow(self) -> None:
        self.value, self.passed = max(self.value / 2, self.smallest), 0

    def note_step(self) -> None:
        self.passed += 1
        if self.window is not None and self.passed >= self.window:
            self.value, self.passed = self.value * 2, 0

    def state(self) -> dict[str, float]:
        """Return what a snapshot must contain."""
        return {"value": self.value, "passed": self.passed}

    def load(self, state: dict[str, float]) -> None:
        """Go on from the state of a snapshot. A constant scale (``--loss-scale``) stays as the flag gives it."""
        if self.window is not None:
            self.value, self.passed = max(float(state["value"]), self.smallest), int(state["passed"])
