"""Estimators and losses of 2025 and 2026 beyond those of the core."""

from slime.registry import register


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
    register("resolver", "recipe", f"{here}.config:resolve", flags=f"{here}.config:RecipeFlags")
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
