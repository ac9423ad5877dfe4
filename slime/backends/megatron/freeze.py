"""Which parameters are trained, by the checkpoint's names."""

from __future__ import annotations

import re

from torch import nn

from slime.backends.megatron.core import MegatronError
from slime.backends.megatron.weights import ModelWeights
from slime.config.args import Args


def select_trainable(weights: ModelWeights, args: Args) -> None:
    """Apply ``--only-train-params-name-list`` or ``--freeze-params-name-list``: regular expressions that are searched
    in the names of the checkpoint.

    Raises:
        MegatronError: they separate what Megatron keeps in one parameter, match nothing, or leave nothing.
    """
    only, freeze = args.only_train_params_name_list, args.freeze_params_name_list
    if not only and not freeze:
        return
    patterns = [re.compile(p) for p in only or freeze or []]
    flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    everything = [hf for name in [*weights.entries, *weights.own] for hf in weights.hf_names(name)]
    for pattern in patterns:
        if not any(pattern.search(name) for name in everything):
            raise MegatronError(f"{flag} {pattern.pattern!r} matches no parameter; names look like {everything[0]!r}")
    for name, tensor in weights.tensors():
        if not isinstance(tensor, nn.Parameter):
            continue
        hits = {any(p.search(hf) for p in patterns) for hf in weights.hf_names(name)}
        if len(hits) > 1:
            raise MegatronError(
                f"{flag} separates {', '.join(weights.hf_names(name)[:3])}, which Megatron keeps in one parameter: "
                "name all of them or none"
            )
        tensor.requires_grad_(hits.pop() == bool(only))
    if not any(_trains(weights.hf_names(n), patterns, bool(only)) for n in [*weights.entries, *weights.own]):
        raise MegatronError(f"{flag} leaves no parameter to train")


def _trains(names: list[str], patterns: list[re.Pattern[str]], only: bool) -> bool:
    return any(any(p.search(name) for p in patterns) == only for name in names)
