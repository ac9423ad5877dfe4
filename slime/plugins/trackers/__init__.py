"""Trackers that are services or need a package: Weights & Biases, MLflow, Trackio, SwanLab and
Prometheus.
"""

from slime.registry import register


def parts() -> None:
    """Register the trackers, the flags of two of them, and their rules."""
    register("rules", "trackers", "slime.plugins.trackers:rules.json")
    here = "slime.plugins.trackers"
    register(
        "tracker",
        "wandb",
        f"{here}.weights_and_biases:Wandb",
        flags=f"{here}.config:WandbConfig",
        package=("wandb", "'slime-rl[wandb]'"),
    )
    register(
        "tracker",
        "prometheus",
        f"{here}.prometheus:Prometheus",
        flags=f"{here}.config:PrometheusConfig",
        package=("prometheus_client", "prometheus-client"),
    )
    for name, tracker in (("mlflow", "Mlflow"), ("trackio", "Trackio"), ("swanlab", "Swanlab")):
        package = (name, f"'slime-rl[{name}]'")
        register("tracker", name, f"{here}.services:{tracker}", package=package)
