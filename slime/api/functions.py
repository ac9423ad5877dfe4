"""Functions of a program or notebook, made available to a run, and its callbacks.

**Parameters.** A function whose first parameter is ``args`` is used as on the command line. Any
other function gets what its parameters are named after, for instance ``lambda response, label:
float(label in response)``. A single parameter with another name gets the sample (in a filter: the
group).

**Files.** A small file of Python stands for each function, so that it has a path like that of any
other function of the user's, and all of slime treats it as one. In this process, the file gives the
function itself. For other processes, the function is pickled by value with cloudpickle, which Ray
brings. They get a copy: what it changes outside of itself is not seen by the program.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.hooks import is_async
from slime.data.sample import Sample, flatten

if TYPE_CHECKING:
    from slime.api.trainer import Trainer

Function = Callable[..., Any]
OF_A_SAMPLE = ("prompt", "response", "label", "metadata")
_GROUP = ("samples", "group", "rewards")


class UnknownParameters(TypeError):
    """slime does not know what to pass for a parameter; the message names those that it knows."""


def adapt(name: str, function: Function) -> Function:
    """Return ``function`` as the flag ``name`` (an attribute of the arguments) needs it.

    Raises:
        UnknownParameters: The function has parameters that slime does not know.
    """
    known = {
        "custom_rm_path": (("sample", *OF_A_SAMPLE, "samples"), "sample", _reward),
        "custom_generate_function_path": (
            ("sample", "sampling_params", "evaluation", "samples"),
            "sample",
            _generate,
        ),
        "dynamic_sampling_filter_path": (_GROUP, "group", _filter),
    }.get(name)
    if known is None or inspect.isclass(function):
        return function
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # Some built-in functions have no signature.
        return function
    if parameters and parameters[0].name in ("args", "_args"):
        return function
    columns = {one.name: one.name for one in parameters}
    if name == "custom_rm_path" and "completions" in columns:
        if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
            columns = {}  # it takes all
        return _made(ColumnsReward, function, columns)
    names, alone, make = known
    wanted = _wanted(parameters, names, alone)
    return make(function, wanted)


def _wanted(
    parameters: Sequence[inspect.Parameter], names: Sequence[str], alone: str
) -> dict[str, str]:
    """Return what each parameter of a function gets: the known name by parameter name."""
    # ``*args`` and ``**kwargs`` take whatever there is, so they ask for nothing.
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    plain = [parameter for parameter in parameters if parameter.kind not in variadic]
    needed = [parameter.name for parameter in plain if parameter.default is parameter.empty]
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in plain):
        raise UnknownParameters(
            "its parameters have no names to pass values by: wrap it, for instance lambda response: …"
        )
    unknown = [name for name in needed if name not in names]
    optional = {parameter.name: parameter.name for parameter in plain if parameter.name in names}
    # One parameter of any name, such as ``lambda s: …``: it is clear what is meant.
    if len(needed) == 1 and unknown:
        return {needed[0]: alone, **optional}
    if unknown or not needed:
        listed = ", ".join(map(repr, unknown))
        what = f"the parameters {listed} are unknown"
        if not unknown:
            what = "it has no parameter"
        elif len(unknown) == 1:
            what = f"the parameter {listed} is unknown"
        raise UnknownParameters(
            f"{what}; slime passes what a parameter is named after: args (first), "
            f"{', '.join(names)}"
        )
    return optional


class _Adapter:
    """A function of the user's, and what it gets: a known name for each of its parameters."""

    __call__: Callable[..., Any]

    def __init__(self, function: Function, wanted: dict[str, str]) -> None:
        self.function = function
        self.wanted = wanted
        self.__qualname__ = self.__name__ = getattr(function, "__name__", type(function).__name__)

    def call(self, values: Mapping[str, object]) -> Any:
        return self.function(**{name: values[key] for name, key in self.wanted.items()})


def _made(adapter: type[_Adapter], function: Function, wanted: dict[str, str]) -> Function:
    """Return the adapter of a function. That of an async function is awaited, and has the same
    parameters.
    """
    if not is_async(function):
        return adapter(function, wanted)
    inner = adapter.__call__

    @functools.wraps(inner)
    async def awaited(self: _Adapter, *given: object, **more: object) -> object:
        return await inner(self, *given, **more)

    made: Function = type(adapter.__name__, (adapter,), {"__call__": awaited})(function, wanted)
    return made


class Reward(_Adapter):
    def __call__(self, args: object, sample: Sample, **more: object) -> Any:
        values = {name: getattr(sample, name) for name in OF_A_SAMPLE}
        return self.call({"sample": sample, **values})


class GroupReward(_Adapter):
    """Scores all samples of a group in one call, with ``--group-rm``."""

    def __call__(self, args: object, samples: list[Sample], **more: object) -> Any:
        return self.call({"samples": samples, "args": args})


class ColumnsReward(GroupReward):
    """A reward of TRL's form, called with lists over the samples of a group, named as columns."""

    def call(self, values: Mapping[str, Any]) -> Any:
        rows = []
        for sample in values["samples"]:
            chat = [{"role": "assistant", "content": sample.response}]
            said = sample.response if isinstance(sample.prompt, str) else chat
            row = {**sample.metadata, values["args"].label_key or "label": sample.label}
            rows.append(row | {"prompts": sample.prompt, "completions": said})
        names = [name for name in self.wanted or rows[0] if name in rows[0]]
        return self.function(**{name: [row.get(name) for row in rows] for name in names})


def _reward(function: Function, wanted: dict[str, str]) -> Function:
    if "samples" not in wanted.values():
        return _made(Reward, function, wanted)
    if len(wanted) > 1:
        raise UnknownParameters("a reward of a group has samples as its only parameter")
    return _made(GroupReward, function, wanted)


class Generate(_Adapter):
    def __call__(
        self, args: object, sample: Sample, sampling_params: object, evaluation: bool = False
    ) -> Any:
        return self.call(
            {"sample": sample, "sampling_params": sampling_params, "evaluation": evaluation}
        )


class GenerateList(_Adapter):
    def __call__(self, args: object, samples: list[Sample], evaluation: bool = False) -> Any:
        return self.call({"samples": samples, "evaluation": evaluation})


def _generate(function: Function, wanted: dict[str, str]) -> Function:
    return _made(GenerateList if "samples" in wanted.values() else Generate, function, wanted)


class Filter(_Adapter):
    def __call__(self, args: object, group: list[Any]) -> Any:
        samples = flatten(group)
        rewards = [sample.reward for sample in samples]
        return self.call({"group": group, "samples": samples, "rewards": rewards})


def _filter(function: Function, wanted: dict[str, str]) -> Function:
    if is_async(function):
        raise UnknownParameters("a filter is called without await: use a plain def")
    return Filter(function, wanted)


# --- files ---------------------------------------------------------------------------------

_LOADER = '''"""{what}, as it was given to slime in Python."""

from slime.api.functions import unpack

{name} = unpack(__file__, {paths!r})
'''


_held: dict[Path, Callable[..., object]] = {}
"""The functions of this process, by the files that stand for them."""


def ship(function: Callable[..., object], name: str, folder: Path) -> str:
    """Write a file for ``function``, and return its path in the form of the command line,
    ``file.py:name``.

    Until :func:`pack`, the function can be loaded in this process only.

    Args:
        name: A Python name, also that of the file.
    """
    loader = folder / f"{name}.py"
    _held[loader] = function
    paths = [str(Path(path or ".").resolve()) for path in sys.path]
    loader.write_text(_LOADER.format(what=name, name=name, paths=paths), encoding="utf-8")
    return f"{loader}:{name}"


def columns_of_reward(folder: Path) -> set[str]:
    """What the reward that was shipped to ``folder`` needs of each row beside the prompt: its
    parameters without a default, among them ``label``.
    """
    reward = _held.get(folder / "reward.py")
    if not isinstance(reward, Reward | ColumnsReward):
        return set()
    needed = {
        one.name
        for one in inspect.signature(reward.function).parameters.values()
        if one.default is one.empty and one.kind is not one.VAR_KEYWORD
    }
    columns = isinstance(reward, ColumnsReward)
    return needed - {"prompts", "completions"} if columns else needed & {"label"}


def pack(folder: Path) -> list[str]:
    """Pickle the functions that were shipped to ``folder``, for other processes.

    Returns:
        Problems: functions that refer to something that cannot be pickled, such as a lock or a
            connection.
    """
    from ray import cloudpickle

    problems = []
    for loader, function in _held.items():
        if loader.parent != folder:
            continue
        try:
            loader.with_suffix(".pkl").write_bytes(cloudpickle.dumps(function))
        except Exception as error:  # Objects raise what they like when they are pickled.
            problems.append(f"{loader.stem}: {_blame(function, error)}")
    return problems


def forget(folder: Path) -> None:
    """Drop the functions that were shipped to ``folder``."""
    for loader in [loader for loader in _held if loader.parent == folder]:
        del _held[loader]


def unpack(loader: str, paths: list[str]) -> Any:
    """Return the function for which the file ``loader`` stands.

    Args:
        paths: The program's ``sys.path``, on which the modules that the function imports are found.
    """
    if (function := _held.get(Path(loader))) is not None:
        return function
    from ray import cloudpickle

    # The function is pickled by value, but modules that it imports are found by name.
    sys.path.extend(path for path in paths if path not in sys.path)
    return cloudpickle.loads(Path(loader).with_suffix(".pkl").read_bytes())


def _blame(function: Callable[..., object], error: Exception) -> str:
    """Explain the error, with the variables of the function that cannot be pickled."""
    from ray import cloudpickle

    # An adapter holds the user's function; its closure is what can be mended.
    inner = inspect.unwrap(getattr(function, "function", function))
    variables: dict[str, object] = {}
    # Only names that the function uses: a module has many others that cannot be pickled.
    if inspect.isfunction(inner):
        found = inspect.getclosurevars(inner)
        variables = {**found.globals, **found.nonlocals}
    elif inspect.ismethod(inner):
        variables = {"self": inner.__self__}
    guilty = []
    for name, value in variables.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            guilty.append(f"{name} (a {type(value).__name__})")
    where = f": it uses {', '.join(guilty)}" if guilty else ""
    return (
        f"it cannot be sent to the processes of the run{where} ({type(error).__name__}: {error}); "
        "create such objects inside the function"
    )


# --- what a program can do between the phases of a run ----------------------------------------------


class Callback:
    """Override what you need. All methods are called in the program's process, when the phase is
    complete.

    An exception ends :func:`slime.train`; in a loop of your own it comes out of
    :meth:`Trainer.step`, and the run goes on with the next call. To end a run after a step, call
    ``trainer.stop()``.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Engines and trainer have loaded the model."""

    def on_step(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """A rollout was trained, and the engines have the new weights."""

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """All evaluation sets were evaluated."""

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        """A snapshot was written. With ``async_save``, only its copy in memory is complete."""

    def on_end(self, trainer: Trainer) -> None:
        """The run is complete or was stopped; its processes still answer."""


class OnStep(Callback):
    """A function of ``(trainer, metrics)`` that is called after each step."""

    def __init__(self, function: Callable[[Trainer, Mapping[str, float]], object]) -> None:
        self.function = function

    def on_step(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.function(trainer, metrics)


def as_callback(given: Callback | Callable[[Trainer, Mapping[str, float]], object]) -> Callback:
    """Return a callback, or one that calls the function ``given`` after each step.

    Raises:
        TypeError: It is neither.
    """
    # Refused before the start: during the run, it would be noticed after the first step.
    if isinstance(given, Callback):
        return given
    if not callable(given) or isinstance(given, type):
        raise TypeError(
            f"a callback is a slime.Callback or a function of (trainer, metrics), not {given!r:.80}"
        )
    if is_async(given):
        raise TypeError("a callback is called without await: use a plain def")
    return OnStep(given)
