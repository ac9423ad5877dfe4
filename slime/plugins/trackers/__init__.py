"""Trackers that are services or need a package: Weights & Biases, MLflow, Trackio and SwanLab."""

from slime.registry import register


def parts() -> None:
    """Register the trackers, and the flags of Weights & Biases."""
    here = "slime.plugins.trackers"
    register(
        "tracker",
        "wandb",
        f"{here}.weights_and_biases:Wandb",
        flags=f"{here}.config:WandbConfig",
        package=("wandb", "'slime-rl[wandb]'"),
    )
    for name, tracker in (("mlflow", "Mlflow"), ("trackio", "Trackio"), ("swanlab", "Swanlab")):
        package = (name, f"'slime-rl[{name}]'")
        register("tracker", name, f"{here}.services:{tracker}", package=package)
