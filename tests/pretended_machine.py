"""Checks of flags as on a machine that has other hardware than this one, and every package."""

from __future__ import annotations

import pytest

from slime.config.machine import Machine


def pretend_machine(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Parsing finds ``machine`` with every backend installed, in defaults as in checks."""
    monkeypatch.setattr("slime.config.rules.this_machine", lambda: machine)
    for module in ("resolve", "rules", "run", "trainer"):
        monkeypatch.setattr(f"slime.config.{module}.installed", lambda name: True)
