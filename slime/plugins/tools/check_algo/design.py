"""Which checks an estimator fails by design, with the reason and its source.

An estimator that is not in the table has the reasons of the class that it derives from. A class of
the user adds its own in an attribute ``by_design``, which has the form of one row.
"""

from __future__ import annotations

from collections.abc import Mapping

from slime.config.algorithm import algorithm_class
from slime.config.args import Args
from slime.registry import find, parts

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


def design_of(args: Args) -> tuple[str, dict[str, str]]:
    """Return the registered estimator that a class is or derives from ("" for none), and the
    reasons by the name of the check.
    """
    lineage = algorithm_class(args.advantage_estimator).__mro__
    known = {find("algorithm", one): one for one in parts("algorithm") if one in DESIGN}
    base = next((known[one] for one in lineage if one in known), "")
    reasons = dict(DESIGN.get(base, {}))
    for flag, row in OF_FLAGS.items():
        reasons |= row if getattr(args, flag) else {}
    for one in reversed(lineage):
        reasons |= vars(one).get("by_design", {})
    return base, reasons
