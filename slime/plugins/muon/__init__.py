"""Muon: matrices of layers are updated by orthogonal matrices (``--optimizer muon``)."""

from slime.registry import register


def parts() -> None:
    """Register the optimizer with its flags and rules."""
    register("rules", "muon", "slime.plugins.muon:rules.json")
    register(
        "optimizer",
        "muon",
        "slime.plugins.muon.optimizer:ScheduledMuon",
        flags="slime.plugins.muon.config:MuonFlags",
    )
