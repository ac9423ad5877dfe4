"""Documented import path of the evaluation's data set settings; the code is in
:mod:`slime.data.eval_config`.
"""

from slime.data.eval_config import EvalDatasetConfig, resolve_eval_datasets

__all__ = ["EvalDatasetConfig", "resolve_eval_datasets"]
