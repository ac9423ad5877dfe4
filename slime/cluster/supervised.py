"""What engines, rollout workers and training ranks have in common: each is started again after a
loss, a few times.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Supervised:
    """A part of a run that is started again when it was lost; a restarted part is the same object.

    Attributes:
        most_losses: Losses within ``losses_seconds`` after which another start would not help.
        losses: When it was lost (``time.monotonic()``).
        last_words: The reason for the last loss, or the end of the log.
    """

    most_losses: int = 5
    losses_seconds: float = 600.0
    losses: list[float] = field(default_factory=list)
    last_words: str = ""

    def note_loss(self, why: str) -> None:
        """Count a loss, or a start that failed."""
        self.losses.append(time.monotonic())
        self.last_words = why

    @property
    def hopeless(self) -> bool:
        """Whether it was lost so often that it is not worth another start."""
        recent = [at for at in self.losses if at > time.monotonic() - self.losses_seconds]
        return len(recent) >= self.most_losses

    @property
    def how_often(self) -> str:
        """The limit that a hopeless part has reached, for a message."""
        return f"{self.most_losses} times within {self.losses_seconds:.0f} s"
