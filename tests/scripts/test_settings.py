"""The settings under which all tests run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def test_no_property_test_depends_on_how_fast_the_machine_is() -> None:
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
