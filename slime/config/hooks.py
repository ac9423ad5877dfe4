"""Load the user's functions that flags name, and check that slime can call them."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.config.flag import Flag


class HookError(ValueError):
    """Raised if a hook path does not lead to a function. The message says what was tried and which
    names exist.
    """


SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""The variable with which Python, and this module, do not look for modules in the working
directory.
"""


def load_function(path: str, default_name: str | None = None) -> Any:
    """Resolve ``pkg.module.function``, ``pkg.module:function``, ``file.py:function`` or
    ``file.py``.

    Args:
        path: The path on the command line.
        default_name: The name to take from a bare ``file.py``. Without it, or if the file does not
            have this name, the only public function or class that the file defines.

    Raises:
        HookError: The file, module or name does not exist, or the file defines several public
            names.
    """
    if path.endswith(".py"):
        return _only_public(load_file(path), path, default_name)
    head, colon, name = path.rpartition(":")
    if not colon:
        head, _, name = path.rpartition(".")
    if not head or not name:
        raise HookError(
            f"{path!r} is not the path of a function: use package.module.function, "
            "module:function or file.py:function"
        )
    module = load_file(head) if head.endswith(".py") else _import(head, path)
    try:
        return getattr(module, name)
    except AttributeError:
        raise HookError(
            f"{path!r}: {head} has no {name!r}; it defines "
            f"{', '.join(_public_names(module)) or 'nothing public'}"
        ) from None


def _import(module: str, path: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path and not os.environ.keys() & SAFE_PATH.keys():
        # Python puts the folder of the started program on sys.path. For the slime command this is
        # not the working directory, in which users expect their modules to be found.
        sys.path.append(here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Only the module itself, or one of its parent packages, is missing here. A missing import
        # inside the user's module is the user's own error and is raised as it is.
        if error.name is not None and module.startswith(error.name):
            raise HookError(
                f"{path!r}: there is no module {error.name!r} on the import path (PYTHONPATH and "
                "the working directory)"
            ) from error
        raise


def load_file(path: str) -> ModuleType:
    """Import a Python file as a module, once per process."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise HookError(f"the hook file {path!r} does not exist (resolved to {file})")
    # The same name in every process, so that objects of the file's classes can travel between them.
    name = (
        f"slime_hook_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()}"
    )
    return module_of_file(name, file)


@functools.cache
def module_of_file(name: str, file: Path) -> ModuleType:
    """Execute a Python file as a new module with this name, and return the module."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    # The file may be anywhere, so the import path does not lead to it.
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle look up the module of the file's classes here
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _public_names(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and getattr(value, "__module__", None) == module.__name__
    ]


def _only_public(module: ModuleType, path: str, default_name: str | None) -> Any:
    if default_name is not None and hasattr(module, default_name):
        return getattr(module, default_name)
    names = _public_names(module)
    if len(names) != 1:
        raise HookError(
            f"{path!r} defines {', '.join(names) or 'nothing public'}: name the function as "
            f"{path}:NAME"
        )
    return getattr(module, names[0])


CALLS = {
    "data_source_path": "fn(args)",
    "rollout_function_path": "fn(args, rollout_id, data_source, evaluation=…)",
    "eval_function_path": "fn(args, rollout_id, data_source, evaluation=…)",
    "agent_function_path": "run(task)",
    "custom_rm_path": "fn(args, sample)",
    "buffer_filter_path": "fn(args, rollout_id, buffer, num_samples)",
    "rollout_sample_filter_path": "fn(args, groups)",
    "rollout_all_samples_process_path": "fn(args, all_groups, data_source)",
    "rollout_data_postprocess_path": "fn(args, rollout_id, rollout_data)",
    "custom_rollout_log_function_path": "fn(rollout_id, args, samples, metrics, rollout_time)",
    "custom_eval_rollout_log_function_path": "fn(rollout_id, args, data, metrics)",
    "custom_convert_samples_to_train_data_path": "fn(args, samples)",
    "custom_reward_post_process_path": "fn(args, samples)",
    "custom_advantage_function_path": "fn(args, rollout_data)",
    "custom_loss_function_path": "fn(args, batch, logits, sum_of_sample_mean)",
    "custom_model_provider_path": "fn(pre_process=…, post_process=…)",
    "custom_megatron_init_path": "fn(args)",
    "custom_megatron_before_log_prob_hook_path": "fn(args, model, prefix)",
    "custom_megatron_before_train_step_hook_path": (
        "fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)"
    ),
    "custom_update_weight_post_write_path": "fn(args, version_dir, rollout_engines)",
}
"""For each flag (by attribute): how slime calls its function. Functions that slime calls in several
ways (generation, filters) are missing; ``slime check-hooks`` checks them."""


AWAITED = ("agent_function_path", "custom_rm_path")
"""The flags of :data:`CALLS` whose functions may be async."""


NOT_AWAITED = "it is an async def, but slime calls this hook without await: use a plain def"


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling ``function`` returns a coroutine. It may be a callable object."""
    method = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def call_problem(name: str, function: object) -> str | None:
    """Explain why slime cannot call ``function`` as the flag ``name``; None if it can, or if this
    is not known.
    """
    if not callable(function):
        return f"it is a {type(function).__name__}, not a function"
    # A reward may also be a class, a model whose methods are checked where it is used.
    if name not in CALLS or (name == "custom_rm_path" and inspect.isclass(function)):
        return None
    arguments = re.findall(r"(\w+)(=…)?[,)]", CALLS[name])
    keywords = {argument: None for argument, keyword in arguments if keyword}
    if name not in AWAITED and is_async(function):
        return NOT_AWAITED
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return None
    if name == "custom_rm_path" and "completions" in signature.parameters:
        return (
            "it takes lists of completions, as TRL calls it: give the function itself to "
            "slime.train, or define it as fn(args, sample), where sample.response is the completion"
        )
    try:
        signature.bind(*[None] * (len(arguments) - len(keywords)), **keywords)
    except TypeError as error:
        called = getattr(function, "__name__", type(function).__name__)
        return f"slime calls it as {CALLS[name]}, but it is defined as {called}{signature}: {error}"
    return None


HOOK_NAMES = {
    "custom_generate_function_path": "custom_generate",
    "custom_rm_path": "CustomRewardModel",
}
"""The name that a bare ``file.py`` stands for, for the flags that have a conventional name."""


def check_hooks(flags: Mapping[str, Flag], values: object) -> list[str]:
    """Check that every function that a flag names can be imported and called."""
    problems = []
    for name, flag in flags.items():
        value = getattr(values, name)
        paths = value if flag.kind == "repeat" else [value] if flag.kind == "hook" else []
        # The function of evaluations is by default that of rollouts, which is checked anyway.
        known = None, flag.default, flag.same_as and getattr(values, flag.same_as)
        problems += [hook_problem(flag.option, name, path) for path in paths if path not in known]
    return [problem for problem in problems if problem]


def dotted(path: object) -> object:
    """Write the path of a function of slime with dots only, since other flags depend on which of
    them is chosen.
    """
    own = isinstance(path, str) and path.startswith("slime.") and ".py" not in path
    return str(path).replace(":", ".") if own else path


def hook_problem(option: str, name: str, path: str) -> str | None:
    """Explain why the function at ``path`` cannot be imported, or called as the flag ``name``; None
    if it can.
    """
    try:
        function = load_function(path, HOOK_NAMES.get(name))
    except HookError as error:
        return f"{option}: {error}"
    # a script that does not check __name__; it must not end train.py with its status
    except SystemExit as error:
        called = f"importing it called sys.exit({'' if error.code is None else repr(error.code)})"
        return (
            f"{option} {path}: {called}; move the code of the script below if __name__ == "
            "'__main__'"
        )
    # the user's module can raise anything
    except (Exception, KeyboardInterrupt, GeneratorExit) as error:
        return f"{option} {path}: importing it failed with {type(error).__name__}: {error}"
    problem = call_problem(name, function)
    return f"{option} {path}: {problem}" if problem else None
