"""Trackers that are services or need a package: Weights & Biases, MLflow, Trackio, SwanLab and
Prometheus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import Section, flag, path_flag
from slime.registry import register


@dataclass
class WandbConfig(Section):
    _title = "Weights & Biases"

    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Mode of Weights & Biases. Default: WANDB_MODE"""
    wandb_dir: str | None = path_flag()
    """Folder for files of Weights & Biases. Default: the run's folder"""
    wandb_key: str | None = None
    """API key of Weights & Biases; ps shows it, so prefer the variable WANDB_API_KEY"""
    wandb_host: str | None = None
    """URL of the Weights & Biases server. Default: WANDB_BASE_URL of the environment, or the public
    server
    """
    wandb_team: str | None = None
    """Entity (team or user) of the run in Weights & Biases"""
    wandb_group: str | None = None
    """Group of the run in Weights & Biases"""
    wandb_project: str | None = None
    """Project of the run in Weights & Biases. Default: slime"""
    wandb_run_id: str | None = None
    """Id of the run to resume in Weights & Biases. Default: a new run"""
    wandb_always_use_train_step: bool = False
    """Use optimizer steps instead of rollouts as the x-axis of all metrics in Weights & Biases"""


@dataclass
class PrometheusConfig(Section):
    _title = "Prometheus"

    metrics_port: int = flag(9400, low=0, high=65535)
    """Port where --tracker prometheus serves the numbers of the run; 0: any that is free"""
    metrics_host: str = "127.0.0.1"
    """Address that --tracker prometheus listens on; 0.0.0.0 for all, without any protection"""


def parts() -> None:
    """Register the trackers, the flags of two of them, and their rules."""
    register("rules", "trackers", f"{__name__}:rules.json")
    register(
        "tracker",
        "wandb",
        f"{__name__}.services:Wandb",
        flags=WandbConfig,
        package=("wandb", "'slime-rl[wandb]'"),
    )
    register(
        "tracker",
        "prometheus",
        f"{__name__}.prometheus:Prometheus",
        flags=PrometheusConfig,
        package=("prometheus_client", "prometheus-client"),
    )
    for name, tracker in (("mlflow", "Mlflow"), ("trackio", "Trackio"), ("swanlab", "Swanlab")):
        package = (name, f"'slime-rl[{name}]'")
        register("tracker", name, f"{__name__}.services:{tracker}", package=package)
