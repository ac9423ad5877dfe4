"""The model's shape: config.json with the user's flags on top. Needs no megatron-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.backends.megatron.core import MegatronError
from slime.config.args import Args
from slime.config.megatron_flags import refused_flags
from slime.weights.maps.family import Family, Settings, moe_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def merged_settings(args: Args, family: Family, hf_config: PretrainedConfig) -> Settings:
    """The model's shape: config.json, with the user's flags on top.

    Raises:
        MegatronError: flags contradict config.json (all differences at once), or cannot be honoured.
    """
    settings = family.settings(hf_config.to_dict())
    given = dict(args.megatron)
    differences = [
        f"--{name.replace('_', '-')} {given[name]}, but config.json means {settings.get(name)}"
        for name in given
        if name in settings and not _same(name, given[name], settings)
    ]
    if differences:
        raise MegatronError(
            f"flags describe another model than {args.hf_checkpoint}: "
            + "; ".join(differences)
            + ". Source the model script of this checkpoint, or leave these flags out"
        )
    if problems := refused_flags(given):
        raise MegatronError("; ".join(problems))
    return {**given, **settings}


def _same(name: str, flag: object, settings: Settings) -> bool:
    config = settings[name]
    if name in ("moe_router_load_balancing_type", "moe_token_dispatcher_type", "moe_grouped_gemm"):
        return True  # no difference in the result
    if name == "moe_layer_freq":
        return moe_layers({**settings, name: flag}) == moe_layers(settings)
    if isinstance(flag, (int, float)) and isinstance(config, (int, float)):
        return abs(float(flag) - float(config)) <= 1e-9 * max(abs(float(config)), 1.0)
    return bool(flag == config) or (flag in (None, False) and config in (None, False))
