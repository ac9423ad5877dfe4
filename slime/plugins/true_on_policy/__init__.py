"""``--true-on-policy``: the trainer and the engines compute the same bits."""

from slime.registry import register


def parts() -> None:
    """Register the kernels with their flag and rules."""
    here = "slime.plugins.true_on_policy"
    register(
        "kernels",
        "exact",
        f"{here}.model:use_exact_kernels",
        flags=f"{here}.config:TrueOnPolicyFlags",
        when=("true_on_policy",),
    )
    register("served kernels", "exact", f"{here}.config:SERVED")
    register("rules", "true_on_policy", f"{here}.config:RULES")
