"""Estimators and losses of 2025 and 2026 beyond those of the core; and ``--recipe NAME``, the flags of
a paper at once, which ``recipes.json`` has with their sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.files import read_json
from slime.config.flag import flag
from slime.registry import register

if TYPE_CHECKING:
    from slime.config.args import Args


def recipes() -> dict[str, dict[str, Any]]:
    """Return the table: for each name the flags by argument name, those that are a share of another
    flag, the source, and maybe a note.
    """
    table: dict[str, dict[str, Any]] = read_json(Path(__file__).parent / "recipes.json")
    return table


@dataclass
class RecipeFlags:
    _title = "recipe"

    recipe: str | None = flag(choices=tuple(recipes()))
    """Set the flags of a paper, which are printed; a flag that is given wins"""


def values_of(recipe: dict[str, Any], attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a recipe has for a run with these arguments, by argument name."""
    shares = {
        name: int(attributes[whole] * share)
        for name, (whole, share) in recipe.get("shares", {}).items()
    }
    return recipe["flags"] | shares


def resolve(args: Args) -> list[str]:
    """Set the flags of ``--recipe`` that the user has not set, and tell what it set."""
    from slime.config.args import FLAGS

    if args.recipe is None:
        return []
    recipe = recipes()[args.recipe]
    values = values_of(recipe, vars(args))
    for name in values.keys() - args.explicit:
        setattr(args, name, values[name])
    told = [f"{FLAGS[name].option} {value}".removesuffix(" True") for name, value in values.items()]
    kept = [FLAGS[name].option for name in values if name in args.explicit]
    args.notices.append(
        f"--recipe {args.recipe} ({recipe['source']}): {' '.join(told)}"
        + (f"; as you gave them: {', '.join(kept)}" if kept else "")
        + (f"; {recipe['note']}" if "note" in recipe else "")
    )
    return []


def parts() -> None:
    """Register the estimators of this plug-in."""
    here = "slime.plugins.estimators"
    register("algorithm", "maxrl", f"{here}.maxrl:MaxRl")
    register("algorithm", "sapo", f"{here}.sapo:Sapo", flags=f"{here}.sapo:SapoFlags")
    register("algorithm", "luspo", f"{here}.luspo:Luspo")
    register("algorithm", "vespo", f"{here}.vespo:Vespo", flags=f"{here}.vespo:VespoFlags")
    register("algorithm", "k2_5", f"{here}.k2_5:K25", flags=f"{here}.k2_5:K25Flags")
    register("algorithm", "dppo", f"{here}.dppo:Dppo", flags=f"{here}.dppo:DppoFlags")
    register("algorithm", "dppo_k2_5", f"{here}.dppo:DppoK25", flags=f"{here}.dppo:DppoFlags")
    register("resolver", "recipe", resolve, flags=RecipeFlags)
    register("algorithm", "gdpo", f"{here}.gdpo:Gdpo")
    register("algorithm", "gmpo", f"{here}.gmpo:Gmpo", flags=f"{here}.gmpo:GmpoFlags")
    register(
        "algorithm", "clip_cov", f"{here}.clip_cov:ClipCov", flags=f"{here}.clip_cov:ClipCovFlags"
    )
    register("algorithm", "kl_cov", f"{here}.kl_cov:KlCov", flags=f"{here}.kl_cov:KlCovFlags")
    register("algorithm", "otb", f"{here}.otb:Otb")
    register("algorithm", "rae", f"{here}.rae:Rae", flags=f"{here}.rae:RaeFlags")
    when = ("advantage_estimator=rae",)
    register("group listener", "rae", f"{here}.rae:remember", when=when)
    register("check", "rae", f"{here}.rae:check", when=when)
    register("algorithm", "vaco", f"{here}.vaco:Vaco", flags=f"{here}.vaco:VacoFlags")
