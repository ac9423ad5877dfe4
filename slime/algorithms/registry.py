"""The built-in estimators, by their names in ``--advantage-estimator``.

A new estimator is a file with its class, and one line here. The choices of the flag, its checks, the post-processing of
rewards, the training loop and the table in the documentation are derived from the classes.
"""

from __future__ import annotations

from .algorithm import Algorithm
from .cispo import Cispo
from .dr_grpo import DrGrpo
from .gae import Ppo
from .grpo import Grpo
from .gspo import Gspo
from .reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from .rloo import Rloo

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": Grpo,
    "gspo": Gspo,
    "cispo": Cispo,
    "rloo": Rloo,
    "dr_grpo": DrGrpo,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "ppo": Ppo,
}


def documented_table() -> str:
    """Return the table of estimators for docs/en/algorithms.md, in Markdown."""
    lines = ["| name | advantage of token t | policy loss | other flags | source |", "|---|---|---|---|---|"]
    # With vars(), because an inherited row describes another estimator.
    lines += [f"| `{name}` | " + " | ".join(vars(one)["row"]) + " |" for name, one in ALGORITHMS.items()]
    return "\n".join(line.replace("|  |", "| |") for line in lines)
