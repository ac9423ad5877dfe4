"""What kind of run this is, where it writes, and what scales it to a machine."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass
class RunConfig:
    _title = "run"

    train_backend: str = flag(
        None,
        help="what trains; default: megatron on CUDA where installed, else fsdp (Hugging Face models)",
        choices=("fsdp", "megatron"),
    )
    rollout_backend: str = flag(
        None,
        help="what generates; default: sglang on CUDA where installed, else embedded (our own server)",
        choices=("embedded", "sglang"),
    )
    deterministic: bool = flag(
        None,
        kind="toggle",
        help="same seed, same run: fixed compute shapes, groups judged in submission order. Bit for bit with FSDP and "
        "the embedded engine on the CPU, where it is the default (not with --partial-rollout); best effort with SGLang "
        "and on GPUs",
    )
    seed: int = flag(1234, help="seed of initialisation, dropout and everything the trainer draws")
    output_dir: str = flag("outputs", help="each run writes a folder of its own below this one")
    run_name: str = flag(
        None,
        help="name of the run's folder; default: model, estimator and time, or the resumed run's",
    )
    override: str = flag(
        None,
        kind="path",
        help="YAML file of flag names and values, applied last and printed: scales a recipe to a machine",
    )
    custom_config_path: str = flag(
        None,
        kind="path",
        help="YAML file; every key becomes an attribute of args (before the checks), for the user's own hooks",
    )
    config: str = flag(None, kind="path", help="YAML of defaults", status="refused", reason="use --override FILE")
    start_timeout: float = flag(900.0, above=0, help="seconds that an engine or the trainer may take to start")
    status_timeout: float = flag(
        120.0,
        low=0,
        help="seconds without an answer after which the rollout manager or a training rank counts as lost, long before "
        "--phase-timeout; 0: never",
    )
    phase_timeout: float = flag(3600.0, above=0, help="seconds that generate, train or a weight sync may take")
