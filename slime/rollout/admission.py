"""How much generation may start ahead of training: by the room in the buffer and by the age that weights may reach.

Groups train in the order of their admission, so the place of a group in that order says, before it starts, in which
step it trains at the latest. A version of the weights is the number of steps that have trained them, so step ``s``
trains those of version ``s``, and with an update every ``K`` steps the engines hold 0, K, 2K, … With rollouts of ``B``
groups, the group at place ``p`` trains in step ``p // B`` or earlier (a filter that drops groups before it only moves
it forward). Started under version ``v``, its oldest token is at most ``p // B - v`` steps old then, also when later
versions go on with it. It may start when that is at most the bound, and when it is among the
``(1 + N) B`` groups that may be admitted and not yet trained. Nothing is thrown away for its age.

The same object serves all modes: one-step (``N = K = 1``), buffered (the unit is a rollout: ``batch = 1``) and fully
asynchronous (the unit is a group: ``batch = B``).
"""

from __future__ import annotations

from slime.config.rollout import staleness_bound


class Admission:
    """The account of a pool: what was admitted, taken and trained, and what may still start.

    Not safe for threads: whoever owns the pool owns this.

    Args:
        batch: units (groups, or whole rollouts) that one step trains.
        buffer_size: batches that may be admitted beside the one that trains (``--async-buffer-size``).
        update_interval: steps between two updates (``--update-weights-interval``).
        max_staleness: ``--max-weight-staleness``; None: whatever the two above imply.
        first_step: of this process: 0, or where a resumed run goes on.
        last_step: the step after the last, for which nothing starts; None: there is none.

    Attributes:
        bound: steps between the weights of a unit's start and its training, at most.
        version: of the engines' weights: the steps that had trained them.
        open: units admitted, not dropped and not yet taken.
    """

    def __init__(
        self,
        batch: int,
        buffer_size: int,
        update_interval: int = 1,
        max_staleness: int | None = None,
        first_step: int = 0,
        last_step: int | None = None,
    ) -> None:
        numbers = {"batch": (batch, 1), "buffer_size": (buffer_size, 0), "update_interval": (update_interval, 1)}
        numbers |= {"max_staleness": (0 if max_staleness is None else max_staleness, 0), "first_step": (first_step, 0)}
        wrong = [
            f"{name} is {value}, it must be at least {least}"
            for name, (value, least) in numbers.items()
            if value < least
        ]
        if max_staleness is not None and 0 <= max_staleness < update_interval - 1:
            wrong.append(
                f"max_staleness is {max_staleness}, but weights get {update_interval - 1} steps old by themselves"
            )
        if wrong:
            raise ValueError("; ".join(wrong))
        self.batch, self.first_step = batch, first_step
        self.capacity = batch * (1 + buffer_size)
        self.max_staleness = max_staleness
        self.bound = staleness_bound(buffer_size, update_interval, max_staleness)
        self.end = None if last_step is None else batch * (last_step - first_step)
        self.version = first_step
        self.open = 0
        self._taken = 0
        self._trained = 0

    @property
    def place(self) -> int:
        """Of the next unit to be admitted, if none before it is dropped."""
        return self._taken + self.open

    def room(self) -> int:
        """Units that may start now."""
        last = min(self._trained + self.capacity, self._young())
        return max((last if self.end is None else min(last, self.end)) - self.place, 0)

    def held_by(self) -> str | None:
        """What lets nothing more start: ``"staleness"``, ``"buffer"`` or None."""
        if self.room():
            return None
        return "staleness" if self.limited_by_staleness else "buffer"

    @property
    def limited_by_staleness(self) -> bool:
        """Whether age lets less start than the buffer would."""
        return self._young() < self._trained + self.capacity

    def _young(self) -> int:
        """The first place that would be too old when it trains."""
        if self.max_staleness is None:
            return self._trained + self.capacity
        return (self.version + self.max_staleness + 1 - self.first_step) * self.batch

    def admit(self, count: int = 1) -> None:
        """``count`` units start, with the weights of now.

        Raises:
            ValueError: there is less room.
        """
        if count > self.room():
            raise ValueError(f"{count} cannot start: there is room for {self.room()} (held by {self.held_by()})")
        self.open += count

    def dropped(self, count: int = 1) -> None:
        """Admitted units that will not train: filtered out, replaced, or given back."""
        self._close(count)

    def taken(self, count: int | None = None) -> None:
        """The trainer has these, the oldest ones (default: a batch)."""
        count = self.batch if count is None else count
        self._close(count)
        self._taken += count

    def trained(self) -> None:
        """The step of all units taken so far is over. Tell a new version (:meth:`version_changed`) first."""
        self._trained = self._taken

    def version_changed(self, version: int) -> None:
        """The engines hold these weights: those that an update after ``step`` brings are ``step + 1``.

        Raises:
            ValueError: an older version than before.
        """
        if version < self.version:
            raise ValueError(f"version {version} comes after version {self.version}")
        self.version = version

    def _close(self, count: int) -> None:
        if count > self.open:
            raise ValueError(f"{count} of {self.open} open units cannot end")
        self.open -= count
