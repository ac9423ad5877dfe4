"""How much generation may start ahead of training, limited by the size of the buffer and by the
staleness bound.

Groups are trained in the order of admission, so the place of a group in that order determines,
before the group starts, the latest step that can train it. The version of weights is the number of
steps that have trained them. Step ``s`` therefore trains weights of version ``s``, and with an
update every ``K`` steps the engines hold the versions 0, K, 2K, … With rollouts of ``B`` groups,
the group at place ``p`` is trained in step ``p // B`` or earlier (a filter that drops groups before
it only moves it forward). If the group starts with version ``v``, its oldest token is at most ``p
// B - v`` steps old when it is trained, even if later versions continue its generation. The group
may start if this number is within the bound, and if the group is one of the ``(1 + N) B`` groups
that may be admitted and not yet trained (``N`` is ``--async-buffer-size``). No group is discarded
for its age.

One class covers all modes: one-step (``N = K = 1``), buffered (the unit is a rollout: ``batch =
1``) and fully asynchronous (the unit is a group: ``batch = B``).
"""

from __future__ import annotations

from slime.config.rollout import staleness_bound


class Admission:
    """Counts what was admitted, taken and trained, and decides how much may start.

    Not thread-safe: only the owner of the pool may call it.

    Args:
        batch: Number of units (groups, or whole rollouts) that one step trains.
        buffer_size: Number of batches that may be admitted besides the one in training
            (``--async-buffer-size``).
        update_interval: Number of steps between two weight updates (``--update-weights-interval``).
        max_staleness: ``--max-weight-staleness``. None: the bound that the two values above imply.
        first_step: First step of this process: 0, or the step at which a resumed run continues.
        last_step: The step after the last one, for which nothing starts any more. None: no end.
        version: Version of the engines' weights at the start. None: ``first_step``. It is older in
            a run that resumes between two updates with the weights that the engines had.

    Attributes:
        bound: Maximum number of steps between the weights with which a unit starts and the step
            that trains it.
        version: Version of the engines' weights: the number of steps that have trained them.
        open: Number of units that were admitted, not dropped and not yet taken.
    """

    def __init__(
        self,
        batch: int,
        buffer_size: int,
        update_interval: int = 1,
        max_staleness: int | None = None,
        first_step: int = 0,
        last_step: int | None = None,
        version: int | None = None,
    ) -> None:
        self.batch = batch
        self.first_step = first_step
        self.capacity = batch * (1 + buffer_size)
        self.max_staleness = max_staleness
        self.bound = staleness_bound(buffer_size, update_interval, max_staleness)
        self.end = None if last_step is None else batch * (last_step - first_step)
        self.version = first_step if version is None else version
        self.open = 0
        self._taken = 0
        self._trained = 0

    @property
    def place(self) -> int:
        """Place of the next unit in the order of admission, if no unit before it is dropped."""
        return self._taken + self.open

    def room(self) -> int:
        """Number of units that may start now."""
        end = min(self._trained + self.capacity, self._first_too_old())
        if self.end is not None:
            end = min(end, self.end)
        return max(end - self.place, 0)

    def held_by(self) -> str | None:
        """What prevents further units from starting: ``"staleness"`` or ``"buffer"``; None if some
        may start.
        """
        if self.room():
            return None
        return "staleness" if self.limited_by_staleness else "buffer"

    @property
    def limited_by_staleness(self) -> bool:
        """Whether the staleness bound allows fewer units than the buffer."""
        return self._first_too_old() < self._trained + self.capacity

    def _first_too_old(self) -> int:
        """The first place whose unit would be too old when it is trained."""
        # the implied bound follows from the capacity, which then is the only limit
        if self.max_staleness is None:
            return self._trained + self.capacity
        return (self.version + self.max_staleness + 1 - self.first_step) * self.batch

    def admit(self, count: int = 1) -> None:
        """Record that ``count`` units start with the current weights.

        Raises:
            ValueError: ``count`` is larger than :meth:`room`.
        """
        if count > self.room():
            raise ValueError(
                f"{count} units cannot start: there is room for {self.room()} (limit: "
                f"{self.held_by()})"
            )
        self.open += count

    def dropped(self, count: int = 1) -> None:
        """Record that admitted units will not be trained: they were filtered out, replaced, or
        given back.
        """
        self._close(count)

    def taken(self, count: int | None = None) -> None:
        """Record that the trainer took the oldest ``count`` units. Default: one batch."""
        count = self.batch if count is None else count
        self._close(count)
        self._taken += count

    def trained(self) -> None:
        """Record that all units taken so far are trained.

        If the weights were updated after that step, call :meth:`version_changed` first.
        """
        self._trained = self._taken

    def version_changed(self, version: int) -> None:
        """Record the version of the engines' weights. An update after ``step`` brings version
        ``step + 1``.

        Raises:
            ValueError: The version is older than the previous one.
        """
        if version < self.version:
            raise ValueError(
                f"weight version {version} was reported after the newer version {self.version}"
            )
        self.version = version

    def _close(self, count: int) -> None:
        if count > self.open:
            raise ValueError(
                f"{count} units cannot be taken or dropped: there are {self.open} open ones"
            )
        self.open -= count
