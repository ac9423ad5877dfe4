"""Several data sets in one run, by weights that may change in its course."""

from slime.registry import register


def parts() -> None:
    """Register the flag of mixtures, what it sets, and the check of their data."""
    here = "slime.plugins.mixture"
    register("resolver", "mixture", f"{here}.config:resolve", flags=f"{here}.config:MixtureFlags")
    mixed = ("prompt_mixture",)
    register("check", "mixture", f"{here}.source:check", when=mixed)
    register("group listener", "mixture", f"{here}.source:listen", when=mixed)
    flags = f"{here}.config:BySourceFlags"
    register("algorithm", "by_source", f"{here}.estimator:BySource", flags=flags)
    when = ("source_estimators",)
    register("check", "by_source", f"{here}.estimator:check", when=when)
