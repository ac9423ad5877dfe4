"""``slime doctor``: why a run hung, died, slowed down or stopped learning, from the files that it
leaves: the findings of all rules, and their page of text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from slime.observability.run_state import FILE as STATE

from . import ends, flight, learning, running
from .facts import Facts, Finding, Rule

RULES: tuple[Rule, ...] = (
    flight.collectives,
    ends.end_of_run,
    ends.hanging,
    learning.not_finite,
    running.samples,
    learning.no_reward,
    learning.nothing_trained,
    learning.large_learning_rate,
    learning.weights_differ,
    learning.gap_by_age,
    learning.gap_of_tokens,
    running.verifiers,
    running.engines,
    learning.reward_falls,
    learning.unstable,
    learning.thresholds,
    learning.entropy,
    learning.lengths,
    learning.dropped,
    learning.no_spread,
    running.slower,
    running.little_room,
    running.slow_parts,
    running.long_tail,
    running.clock,
)
"""In the order of a report: causes before their consequences."""


def diagnose(facts: Facts) -> list[Finding]:
    """Return what is wrong with a run, the likeliest cause first; hints come last."""
    findings = [finding for rule in RULES for finding in rule(facts)]
    return sorted(findings, key=lambda finding: finding.hint)  # a stable sort


def page(facts: Facts, findings: list[Finding]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"{facts.folder.name}: {_status(facts)}"
    if not findings:
        yield "\nNothing conspicuous was found."
    for number, finding in enumerate(findings, start=1):
        yield f"\n{number}. {finding.title}" + (" (hint)" if finding.hint else "")
        for line in finding.evidence:
            yield f"   | {line}"
        yield f"   -> {finding.advice}"
    if facts.outside:
        yield (
            "\n"
            f"{facts.outside} log(s) outside of the run's folder, to which a link leads, were not "
            "read: if the run is yours, put them in its place"
        )


def _status(facts: Facts) -> str:
    steps = f"{len(facts.steps)} steps"
    state = facts.state
    if state is None:
        why = (
            "damaged"
            if (facts.folder / STATE).is_file()
            else "missing, as in runs of older releases"
        )
        return f"{steps}; how the run ended is not known ({STATE} is {why})"
    if facts.died:
        return f"{steps}; its driver is gone"
    if state.status != "running":
        return f"{steps}; {state.status}"
    doing = f"in the phase {state.phase}" if state.phase else "between phases"
    since = f"since {max(time.time() - state.since, 0):.0f} s"
    return f"{steps}; {doing} {since}"
