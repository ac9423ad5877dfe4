"""``--recipe NAME``: the flags of a paper at once. ``recipes.json`` has them, with their sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.args import FLAGS
from slime.config.files import read_json
from slime.config.flag import flag

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
