"""Several data sets in one run, by weights that may change in its course."""

from slime.registry import register


def parts() -> None:
    """Register the flag of mixtures, what it sets, and the check of their data."""
    here = "slime.plugins.mixture"
    register("resolver", "mixture", f"{here}.config:resolve", flags=f"{here}.config:MixtureFlags")
    register("check", "mixture", f"{here}.source:check", when=("prompt_mixture",))
