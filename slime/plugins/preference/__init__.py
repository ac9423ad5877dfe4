"""Training on preferences: DPO and KTO of a policy, and reward models (Bradley–Terry)."""

from slime.registry import register


def parts() -> None:
    """Register the losses of this plug-in, their flags, and what else they set in a run."""
    here = "slime.plugins.preference"
    flags = f"{here}.config:PreferenceFlags"
    losses = {"dpo": "losses:Dpo", "kto": "losses:Kto", "reward_model": "losses:BradleyTerry"}
    for name, loss in losses.items():
        register("loss", name, f"{here}.{loss}", flags=flags)
    register("rules", "preference", "slime.plugins.preference:rules.json")
    register("resolver", "preference", f"{here}.config:resolve")
    register("check", "preference", f"{here}.config:check")
