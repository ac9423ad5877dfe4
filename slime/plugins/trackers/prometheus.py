"""The numbers of a run for Prometheus, over HTTP."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slime.observability.trackers import Tracked, Tracker
from slime.plugins.tools.summary import read_state
from slime.plugins.trackers import PrometheusConfig


class Prometheus(Tracker):
    """Serves the newest value of each metric as a gauge, ``slime_perf_step_time`` for
    ``perf/step_time``, with the name of the run as a label.

    ``slime_phase`` is 1 for the phase that the run is in, ``slime_phase_seconds`` is how long it has
    lasted, and ``slime_step`` has the newest rollout, training and evaluation step. They are read
    when Prometheus asks.
    """

    takes_nan = True

    def __init__(self, run: Tracked) -> None:
        config: PrometheusConfig = run.own
        registry = CollectorRegistry()
        self._numbers = _Numbers(run)
        registry.register(self._numbers)
        self._server, self._thread = start_http_server(
            config.metrics_port, config.metrics_host, registry
        )

    def log(self, numbers: Mapping[str, float], step: int, step_key: str) -> None:
        self._numbers.newest = {**self._numbers.newest, **numbers}
        self._numbers.steps = {**self._numbers.steps, step_key.partition("/")[0]: step}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Numbers(Collector):
    def __init__(self, run: Tracked) -> None:
        self._folder = run.folder
        # Replaced as a whole, because the server's threads read them.
        self.newest: Mapping[str, float] = {}
        self.steps: Mapping[str, int] = {}

    def collect(self) -> Iterator[Metric]:
        """All gauges with their values now."""
        run = self._folder.name
        state = read_state(self._folder)
        if state is not None:
            phase = GaugeMetricFamily(
                "slime_phase", "The phase of the run", labels=["run", "phase"]
            )
            phase.add_metric([run, state.phase or "none"], 1)
            lasted = GaugeMetricFamily("slime_phase_seconds", "Its duration so far", labels=["run"])
            lasted.add_metric([run], time.time() - state.since)
            yield phase
            yield lasted
        steps = GaugeMetricFamily("slime_step", "The newest step", labels=["run", "kind"])
        for kind, step in self.steps.items():
            steps.add_metric([run, kind], step)
        yield steps
        named = {"slime_" + re.sub(r"\W", "_", key): key for key in self.newest}
        for name, key in named.items():
            gauge = GaugeMetricFamily(name, key, labels=["run"])
            gauge.add_metric([run], self.newest[key])
            yield gauge
