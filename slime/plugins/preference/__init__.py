"""Training on preferences: DPO and KTO of a policy, and reward models (Bradley–Terry)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.flag import flag
from slime.registry import register

if TYPE_CHECKING:
    from slime.config.args import Args


LOSSES = ("dpo", "kto", "reward_model")
ROLLOUT = "slime.plugins.preference.rows.generate_rollout"
REFERENCE_POINT = "slime.plugins.preference.losses.set_reference_point"
SOURCE = "slime.plugins.preference.rows.PreferenceSource"


@dataclass
class PreferenceFlags:
    _title = "preference"

    dpo_beta: float = flag(0.1, above=0)
    """Beta of --loss-type dpo: how strongly the policy is kept near the reference"""
    dpo_label_smoothing: float = flag(0.0, low=0, high=0.5)
    """Share of pairs that are taken to be labelled the wrong way round (--loss-type dpo)"""
    kto_beta: float = flag(0.1, above=0)
    """Beta of --loss-type kto: how strongly the policy is kept near the reference"""
    kto_desirable_weight: float = flag(1.0, above=0)
    """Weight of desirable responses (--loss-type kto)"""
    kto_undesirable_weight: float = flag(1.0, above=0)
    """Weight of undesirable responses (--loss-type kto)"""
    completion_column: str = "completion"
    """Column of the response of a row without pairs, whose --label-key says whether it is desirable
    (--loss-type kto)"""
    chosen_column: str = "chosen"
    """Column of the preferred response of a pair: a text, or messages"""
    rejected_column: str = "rejected"
    """Column of the other response of a pair"""
    responses_column: str = "responses"
    """Column of several responses of a row in place of a pair, of which the best and the worst are one"""
    scores_column: str = "scores"
    """Column of their scores: a number for each, or an object of numbers, one for each item of a rubric,
    which --reward-weights weighs"""


def resolve(args: Args) -> list[str]:
    """Select the rollout function and the data source, unless the user has."""
    if args.loss_type not in LOSSES:
        return []
    kto = args.loss_type == "kto"
    chosen = {
        "rollout_function_path": ROLLOUT,
        "data_source_path": SOURCE,
        "n_samples_per_prompt": 1,  # one pair
        "compute_advantages_and_returns": kto,
    }
    if kto:
        chosen["custom_advantage_function_path"] = REFERENCE_POINT
    for name, value in chosen.items():
        if name not in args.explicit:
            setattr(args, name, value)
    return []


def check(args: Args) -> list[str]:
    """Return what does not fit a loss on preferences, and is no row of ``rules.json``."""
    if args.loss_type in LOSSES and args.label_key is None:
        return [f"--loss-type {args.loss_type} needs a --label-key, in whose place pairs are kept"]
    own = args.custom_advantage_function_path == REFERENCE_POINT
    if args.loss_type != "kto" or (
        own and args.compute_advantages_and_returns and not args.normalize_advantages
    ):
        return []
    return [
        "--loss-type kto keeps its reference point where others have advantages: leave out "
        "--custom-advantage-function-path, --disable-compute-advantages-and-returns and "
        "--normalize-advantages"
    ]


def parts() -> None:
    """Register the losses of this plug-in, their flags, and what else they set in a run."""
    here = "slime.plugins.preference"
    losses = {"dpo": "losses:Dpo", "kto": "losses:Kto", "reward_model": "losses:BradleyTerry"}
    for name, loss in losses.items():
        register("loss", name, f"{here}.{loss}", flags=PreferenceFlags)
    register("rules", "preference", f"{here}:rules.json")
    register("resolver", "preference", resolve)
    register("check", "preference", check)
