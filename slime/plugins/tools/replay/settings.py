"""Which settings of a recorded run a replay takes, because somebody else may have made the folder
of the run.

A replay takes flags that hold only data (:func:`holds_data`: numbers, switches, names of a list, and
:data:`TEXTS`). It tells :data:`RUNS_CODE`, and stands in for :data:`STOOD_FOR`. All other flags are
left out; the test of this module lists them, so that a new flag with a free text is not forgotten.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.config.args import FLAGS, spellings
from slime.config.flag import Flag, is_hook_path
from slime.config.passthrough import by_name, programs
from slime.config.settings import HIDDEN, RESERVED, redacted

RUNS_CODE = frozenset((
    "trust_remote_code", "train_env_vars", "megatron_config_path", "advantage_estimator", "attn_implementation",
    "rollout_data_postprocess_path", "custom_convert_samples_to_train_data_path", "custom_reward_post_process_path",
    "custom_loss_function_path", "custom_advantage_function_path", "custom_pg_loss_reducer_function_path",
    "custom_tis_function_path", "custom_megatron_init_path", "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
))  # fmt: skip
"""Settings with which a step runs code that is not slime's own, or that set flags which do (a file
per role).
"""
TEXTS = frozenset((
    "hf_checkpoint", "model_name", "only_train_params_name_list", "freeze_params_name_list", "lora_target_modules",
    "lora_exclude_modules", "input_key", "label_key", "metadata_key", "tool_key", "multimodal_keys",
    "apply_chat_template_kwargs", "rollout_stop", "rm_type", "rm_url", "rm_model_path", "reward_key", "load",
    "ref_load", "critic_load", "opd_teacher_load", "log_reward_category", "update_weight_disk_dir", "reward_weights",
    "source_estimators", "chosen_column", "rejected_column", "completion_column", "responses_column",
    "scores_column", "distill_teacher",
))  # fmt: skip
"""Texts that are names, patterns or data to read."""
STOOD_FOR = frozenset(
    ("custom_generate_function_path", "rollout_function_path", "custom_rollout_log_function_path")
)
"""Functions that a replay does not call, but checks and metrics depend on whether they are the
user's.
"""
MEGATRON_CODE = frozenset(("spec", "fp4_quantizer_factory", "fp8_quantizer_factory"))
MEGATRON_TEXTS = frozenset((
    "cp_comm_type", "cuda_graph_scope", "data_parallel_sharding_strategy", "linear_attention_freq",
    "moe_aux_loss_coeff", "moe_layer_freq", "moe_router_load_balancing_type", "muon_fp32_matmul_prec",
    "muon_scale_mode", "muon_tp_mode", "no_rope_freq", "offload_modules", "optimizer", "outer_dp_sharding_strategy",
    "pipeline_model_parallel_layout", "recompute_modules", "window_attn_skip_freq", "position_embedding_type",
    "rope_type", "weight_decay_incr_style", "dist_ckpt_strictness",
))  # fmt: skip
_OWN = re.compile(r"slime\.rollout(\.\w+)+")
_MODELS = (
    "hf_checkpoint", "load", "ref_load", "critic_load", "opd_teacher_load", "distill_teacher",
)  # fmt: skip


def holds_data(flag: Flag) -> bool:
    """Whether every value of a flag is a number, a switch or a word of a list, which names neither
    a file nor code.
    """
    numbers = flag.is_bool or flag.value_type in (int, float, bool)
    return (numbers or (bool(flag.choices) and not flag.or_hook)) and flag.name not in RUNS_CODE


@dataclass(frozen=True)
class Recorded:
    """The settings of a recorded step, by the names of a file for ``--custom-config-path``.

    Attributes:
        data: What a replay takes as it is.
        code: What runs code that the folder of the run names.
        own: The attributes of the user's own, which functions of the user may read.
        unrecorded: The environment variables whose values the run did not record.
    """

    data: dict[str, Any]
    code: dict[str, Any]
    own: dict[str, Any]
    unrecorded: tuple[str, ...]

    def lines(self, directory: Path) -> Iterator[str]:
        """Yield each setting of ``code`` with the files that it runs, or with its value."""
        for name, value in self.code.items():
            if name == "trust_remote_code":
                for file in _model_code(self.data):
                    yield f"{name}: {file}"
            elif name == "train_env_vars":
                shown = redacted("", value)
                pairs = (
                    [f"{one}={text}" for one, text in shown.items()]
                    if isinstance(shown, dict)
                    else [shown]
                )
                yield from (f"{name}: {pair}" for pair in pairs)
            else:
                module = (
                    str(value).partition(":")[0]
                    if ":" in str(value)
                    else str(value).rpartition(".")[0]
                )
                file = os.path.join(directory, f"{module.replace('.', '/')}.py")
                yield f"{name}: {value}" + (f" ({file})" if os.path.isfile(file) else "")


def recorded_settings(settings: Mapping[str, Any], directory: Path, stand_in: str) -> Recorded:
    """Divide the settings of a run, whose relative paths refer to ``directory``.

    Args:
        stand_in: The import path of the function that stands for those of :data:`STOOD_FOR`.
    """
    data: dict[str, Any] = {}
    code: dict[str, Any] = {}
    unrecorded: tuple[str, ...] = ()
    known = {
        name: value for name, value in settings.items() if value is not None and value != HIDDEN
    }
    # slime's own flags, each by its kind.
    for name in (name for name in FLAGS if name in known):
        value = known[name]
        if name in STOOD_FOR:
            # slime's own functions stay: other settings follow from them.
            data[name] = value if _OWN.fullmatch(str(value)) else stand_in
        elif name == "train_env_vars" and isinstance(value, Mapping):
            unrecorded = tuple(sorted(str(one) for one, text in value.items() if text == HIDDEN))
            code[name] = {one: text for one, text in value.items() if text != HIDDEN}
        elif name in RUNS_CODE:
            code[name] = _resolved(value, directory)
        elif name in TEXTS or holds_data(FLAGS[name]):
            data[name] = _resolved(value, directory) if FLAGS[name].kind == "path" else value
    # Those that are passed on to Megatron.
    own_names = {name for name, spelling in spellings().items() if spelling.family is None}
    megatron = by_name("megatron")
    given = known.get("megatron")
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if name in MEGATRON_CODE:
            code[name] = value
        elif (
            name in megatron
            and name not in own_names
            and (name in MEGATRON_TEXTS or holds_data(megatron[name].flag))
        ):
            data[name] = value
    # Names that are no flags are attributes that the user's functions read.
    left = {*own_names, *RESERVED, *programs(), *megatron}
    own = {
        name: known[name]
        for name in known
        if name.isidentifier() and name not in left and name[0] != "_"
    }
    # Some of them run code only with certain values.
    running = {name: value for name, value in code.items() if _runs_code(name, value, data)}
    # built-in ones, by name
    plain = {"advantage_estimator", "attn_implementation"} & code.keys() - running.keys()
    data |= {name: code[name] for name in plain}
    return Recorded(data, running, own, unrecorded)


def _runs_code(name: str, value: object, data: Mapping[str, Any]) -> bool:
    if name == "trust_remote_code":
        return value is True and bool(_model_code(data))
    if name == "train_env_vars":
        return bool(value)
    if name == "advantage_estimator":
        return is_hook_path(str(value))
    # org/name is a kernel of the Hub
    return name != "attn_implementation" or not str(value).isidentifier()


def _model_code(data: Mapping[str, Any]) -> list[str]:
    """Return the Python files of the models, or where they would be downloaded from."""
    files: list[str] = []
    for place in dict.fromkeys(str(data[name]) for name in _MODELS if data.get(name)):
        folder = Path(place)
        files += (
            sorted(map(str, folder.glob("*.py")))
            if os.path.isdir(folder)
            else [f"the Python files of {place}"]
        )
    return files


def _resolved(value: object, directory: Path) -> Any:
    """Return a path, or a function's ``file.py:name``, in the folder in which the run was started,
    if it is there.
    """
    if not isinstance(value, str):
        return value
    # A function is named by its file, which may be relative to where the run was started.
    file, colon, name = value.partition(".py:")
    place = os.path.join(directory, os.path.expanduser(f"{file}.py" if colon else value))
    if not os.path.exists(place):
        return value
    return f"{place}:{name}" if colon else place
