"""Training on preferences: DPO of a policy, and reward models (Bradley–Terry)."""

from slime.registry import register


def parts() -> None:
    """Register the losses of this plug-in, their flags, and what else they set in a run."""
    here = "slime.plugins.preference"
    flags = f"{here}.config:PreferenceFlags"
    for name, loss in (("dpo", "Dpo"), ("reward_model", "BradleyTerry")):
        register("loss", name, f"{here}.losses:{loss}", flags=flags)
    register("resolver", "preference", f"{here}.config:resolve")
    register("check", "preference", f"{here}.config:check")
