"""``slime check-algo``: an estimator beside the exact gradient of the expected reward, on a policy
so small that every response can be enumerated. A verdict and two tables; and which checks
an estimator fails by design, with the reason and its source.

An estimator that is not in the table has the reasons of the class that it derives from. A class of
the user adds its own in an attribute ``by_design``, which has the form of one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from slime.config.algorithm import algorithm_class
from slime.config.args import Args
from slime.registry import find, parts

from .checks import CHECKS, Checks, Finding, run_checks
from .lab import ONE_LENGTH, Lab, Measured, measure


@dataclass(frozen=True)
class Checked:
    """A check with its finding, and the reason if it may fail by design."""

    name: str
    finding: Finding
    reason: str = ""

    @property
    def state(self) -> str:
        if self.finding.holds:
            return "ok"
        return "by design" if self.reason else "FAILS"


@dataclass(frozen=True)
class Report:
    """What was found about one estimator.

    Attributes:
        base: The registered estimator that it is or derives from; empty for none.
        rows: Bias and variance; empty if they could not be measured.
    """

    name: str
    base: str
    checks: tuple[Checked, ...]
    rows: tuple[Measured, ...] = ()

    @property
    def failing(self) -> list[Checked]:
        """The checks that fail without a reason. The first one is the most specific."""
        return [one for one in self.checks if one.state == "FAILS"]

    @property
    def verdict(self) -> str:
        if self.failing:
            first, *others = self.failing
            more = f" (also: {', '.join(one.name for one in others)})" if others else ""
            return f"WRONG: {first.name}: {first.finding.text}{more}"
        direction = next(one for one in self.checks if one.name == "direction")
        if direction.finding.holds:
            return "unbiased"
        return f"biased by design: {direction.reason}"


def check_algorithm(args: Args) -> Report:
    """Run all checks and measurements of the estimator in ``args`` (:func:`.lab.make_args`)."""
    base, reasons = design_of(args.advantage_estimator, vars(args))
    checks = Checks(args)
    checked = tuple(
        Checked(check, finding, reasons.get(check, "")) for check, finding in run_checks(checks)
    )
    # A class that raises an error has no gradient to measure.
    raised = any(math.isinf(one.finding.off) for one in checked)
    size = args.n_samples_per_prompt
    lab = Lab(args, ONE_LENGTH, size, rewarded=checks.regularised)
    rows = () if raised else tuple(measure(lab))
    return Report(args.advantage_estimator, base, checked, rows)


def as_dict(report: Report) -> dict[str, object]:
    """Return what ``--json`` prints."""
    checks = [
        {"name": one.name, "state": one.state, "text": one.finding.text, "reason": one.reason}
        for one in report.checks
    ]
    rows = [asdict(row) for row in report.rows]
    return {"verdict": report.verdict, "checks": checks, "rows": rows}


def page(report: Report) -> Iterator[str]:
    """Yield the lines of the report."""
    base = f" (derives from {report.base})" if report.base not in ("", report.name) else ""
    yield f"{report.name}{base}, beside the exact gradient of the expected reward"
    if report.rows:
        yield ""
        yield f"{'':<18}{'bias':>9}{'cosine':>9}{'length':>9}   variance / RLOO   / REINFORCE"
    for row in report.rows:
        sampled = f" ± {100 * row.error:.1f}%" if row.error else ""
        yield (
            f"{row.name:<18}{100 * row.bias:>8.1f}%{row.cosine:>9.4f}{row.length:>9.3f}"
            f"{row.to_rloo:>18.2f}{row.to_reinforce:>14.2f}{sampled}"
        )
    yield ""
    for one in report.checks:
        why = f"; {one.reason}" if one.state == "by design" else ""
        yield f"{one.name:<24}{one.state:<11}{one.finding.text}{why}"
        if one.state == "FAILS":
            yield f"{'':<24}wanted: {' '.join((CHECKS[one.name].__doc__ or '').split())}"
    yield ""
    yield f"verdict: {report.verdict}"
    lengths = next((row for row in report.rows if row.name.startswith("lengths")), None)
    if lengths is not None and lengths.bias > 0.01 and not report.failing:
        yield (
            f"where responses differ in length, the bias is {100 * lengths.bias:.0f}%; a sum over "
            "tokens in place of their mean (slime.algorithms.dr_grpo.pg_loss_reducer) has no such "
            "part"
        )


_STD = (
    "the deviation of the group divides its rewards, so a prompt weighs by its difficulty "
    "(Liu et al. 2025, Dr. GRPO)"
)
_SEQUENCE = "all tokens of a response share one ratio (Zheng et al. 2025, GSPO)"
_WHITE = "advantages are whitened over the batch, so prompts share one scale (Hu et al. 2025)"
_PRODUCT = "W is the ratio of the whole response (arXiv 2602.10693)"
_NOISE = "a response is in its own baseline, with its noise as the weight (arXiv 2602.07078)"
_PENALTY = "the tokens with the highest covariance have a penalty (arXiv 2505.22617)"

DESIGN: Mapping[str, Mapping[str, str]] = {
    "grpo": {"direction": _STD},
    "gspo": {"direction": _STD, "own ratio": _SEQUENCE},
    "cispo": {"direction": _STD},
    "rloo": {},
    "dr_grpo": {},
    "reinforce_plus_plus": {
        "direction": _WHITE,
        "level of other groups": "the mean over the batch is the baseline (Hu et al. 2025)",
        "spread of other groups": _WHITE,
    },
    "reinforce_plus_plus_baseline": {"direction": _WHITE, "spread of other groups": _WHITE},
    "ppo": {"tokens": "the critic's value of each state is the baseline (Schulman et al. 2016)"},
    "maxrl": {"direction": "the gradient of log p in place of p (arXiv 2602.02710)"},
    "sapo": {"direction": _STD, "ratio": "a soft gate in place of the ratio (arXiv 2511.20347)"},
    "luspo": {"direction": _STD, "own ratio": _SEQUENCE},
    "vespo": {
        "direction": _STD,
        "ratio": "φ(W) in place of the ratio W (arXiv 2602.10693)",
        "own ratio": _PRODUCT,
    },
    "k2_5": {
        "clip": "the ratio is clipped on both sides whatever the advantage (arXiv 2602.02276)",
    },
    "dppo": {"direction": _STD},
    "dppo_k2_5": {"direction": _STD},
    "gdpo": {"direction": _STD},
    "gmpo": {"direction": _STD, "own ratio": "the geometric mean of a response (arXiv 2507.20673)"},
    "vaco": {"direction": _STD},
    "clip_cov": {"direction": _STD},
    "by_source": {"direction": _STD},
    "kl_cov": {"direction": _STD, "ratio": _PENALTY},
    "otb": {
        "tokens": "each token has a baseline of its own (arXiv 2602.07078)",
        "own ratio": _NOISE,
        "leaves": "each sample is one path of its group (arXiv 2602.07078)",
        "ratio": _NOISE,
        "direction": _NOISE,
    },
    "rae": {},
}


OF_FLAGS: Mapping[str, Mapping[str, str]] = {
    "normalize_advantages": {"direction": _WHITE, "spread of other groups": _WHITE},
    "use_opsm": dict.fromkeys(
        ("ratio", "own ratio"), "--use-opsm masks whole responses (DeepSeek-V3.2 2025)"
    ),
    "kl_coef": {"leaves": "a token is charged for the KL of those after it"},
}
"""The same for flags that are on."""


def design_of(estimator: str, flags: Mapping[str, object]) -> tuple[str, dict[str, str]]:
    """Return the registered estimator that a class is or derives from ("" for none), and the
    reasons by the name of the check.
    """
    lineage = algorithm_class(estimator).__mro__
    known = {find("algorithm", one): one for one in parts("algorithm") if one in DESIGN}
    base = next((known[one] for one in lineage if one in known), "")
    reasons = dict(DESIGN.get(base, {}))
    for flag, row in OF_FLAGS.items():
        reasons |= row if flags[flag] else {}
    for one in reversed(lineage):
        reasons |= vars(one).get("by_design", {})
    return base, reasons
