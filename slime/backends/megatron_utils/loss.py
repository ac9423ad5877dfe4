"""The built-in ``--custom-tis-function-path`` hooks, at their documented path."""

from slime.algorithms.mis import compute_mis_weights
from slime.algorithms.off_policy import icepop_function, vanilla_tis_function

__all__ = ["compute_mis_weights", "icepop_function", "vanilla_tis_function"]
