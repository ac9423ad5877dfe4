"""Muon: matrices of layers are updated by orthogonal matrices (``--optimizer muon``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag
from slime.registry import register


@dataclass
class MuonFlags:
    _title = "muon"

    muon_momentum: float = flag(0.95, low=0, high=1)
    """Muon: weight of the earlier gradients in the momentum"""
    muon_use_nesterov: bool = True
    """Muon: look ahead from the momentum by one gradient"""
    muon_num_ns_steps: int = flag(5, low=1, high=100)
    """Muon: iterations of Newton-Schulz"""
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = "spectral"
    """Muon: what an orthogonal update of m x n is multiplied by. spectral: sqrt(max(m, n));
    shape_scaling: sqrt(max(1, m / n)); unit_rms_norm: sqrt(m / n)"""
    muon_extra_scale_factor: float = flag(0.2, above=0)
    """Muon: a further factor. With spectral, 0.2 makes updates as large as Adam's, so that --lr and
    --weight-decay keep their meaning"""


def parts() -> None:
    """Register the optimizer with its flags and rules."""
    register("rules", "muon", "slime.plugins.muon:rules.json")
    register(
        "optimizer",
        "muon",
        "slime.plugins.muon.optimizer:ScheduledMuon",
        flags=MuonFlags,
    )
