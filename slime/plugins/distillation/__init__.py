"""Distillation: the divergence from one or several teachers, over the vocabulary or its top k, and
from the model itself with privileged text.
"""

from slime.registry import register


def parts() -> None:
    """Register the loss of this plug-in, its flags, and what else it sets in a run."""
    here = "slime.plugins.distillation"
    register("loss", "distill", f"{here}.losses:Distill", flags=f"{here}.config:DistillationFlags")
    register("rules", "distillation", "slime.plugins.distillation:rules.json")
    register("resolver", "distillation", f"{here}.config:resolve")
    register("check", "distillation", f"{here}.config:check")
