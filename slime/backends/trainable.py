"""Select the parameters that are trained, by their names in the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

Names = Sequence[str]
"""The names of the checkpoint tensors in one parameter. There are several if a backend fuses them."""
Patterns = Sequence[str] | None


def select_trainable(
    held: Iterable[tuple[nn.Parameter, Names]],
    everywhere: Sequence[Names],
    only: Patterns,
    freeze: Patterns,
    head: str | None = None,
) -> None:
    """Freeze parameters by ``--only-train-params-name-list`` or ``--freeze-params-name-list``.

    These are regular expressions that are searched in the names of the checkpoint.

    Args:
        held: The parameters of this rank.
        everywhere: The names of all parameters of the model, including those on other pipeline stages, so that all
            ranks find the same errors.
        only: The regular expressions of ``--only-train-params-name-list``.
        freeze: The regular expressions of ``--freeze-params-name-list``.
        head: How the names of a critic's head begin. No checkpoint has it, so ``only`` does not freeze it: with random
            values that are never trained, the critic would learn nothing.

    Raises:
        ValueError: The expressions divide a fused parameter, match nothing, or leave no parameter to train.
    """
    if not only and not freeze:
        return
    flag, patterns = ("--only-train-params-name-list", only) if only else ("--freeze-params-name-list", freeze or [])
    for pattern in patterns:
        if not any(re.search(pattern, name) for names in everywhere for name in names):
            raise ValueError(f"{flag} {pattern!r} matches no parameter; names look like {everywhere[0][0]!r}")

    def is_trained(names: Names) -> bool:
        if only and head is not None and names[0].startswith(head):
            return True
        named = {any(re.search(pattern, name) for pattern in patterns) for name in names}
        if len(named) > 1:
            raise ValueError(
                f"{flag} separates {', '.join(names[:3])}, which the training backend keeps in one parameter: name all "
                "of them or none"
            )
        return named.pop() == bool(only)

    if not any([is_trained(names) for names in everywhere]):
        raise ValueError(f"{flag} leaves no parameter to train")
    for parameter, names in held:
        parameter.requires_grad_(is_trained(names))
