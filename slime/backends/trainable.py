"""Which parameters are trained, by the checkpoint's names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from slime.config.args import Args

Names = Sequence[str]
"""The tensors of the checkpoint that one parameter holds: several where a backend fuses them."""


def select_trainable(held: Iterable[tuple[nn.Parameter, Names]], everywhere: Sequence[Names], args: Args) -> None:
    """Freeze by ``--only-train-params-name-list`` or ``--freeze-params-name-list``, regular expressions that are
    searched in the names of the checkpoint.

    Args:
        held: the parameters of this rank.
        everywhere: the names of every parameter of the model, also of those on other pipeline stages, so that all
            ranks come to the same verdict.

    Raises:
        ValueError: the expressions separate what one parameter holds, match nothing, or leave nothing to train.
    """
    only, freeze = args.only_train_params_name_list, args.freeze_params_name_list
    if not only and not freeze:
        return
    flag, patterns = ("--only-train-params-name-list", only) if only else ("--freeze-params-name-list", freeze or [])
    for pattern in patterns:
        if not any(re.search(pattern, name) for names in everywhere for name in names):
            raise ValueError(f"{flag} {pattern!r} matches no parameter; names look like {everywhere[0][0]!r}")

    def is_trained(names: Names) -> bool:
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
