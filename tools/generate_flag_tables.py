#!/usr/bin/env python3
"""Make the tables of pass-through flags in slime/plugins/sglang and slime/plugins/megatron from the
wheels of the pinned versions.

    pip download --no-deps -d WHEELS sglang==0.5.23 sglang==0.5.15.post1 sglang-router==0.3.2 megatron-core==0.16.1
    pip install --no-deps --target SITE msgspec        # SGLang's config records need the real one
    python tools/generate_flag_tables.py --wheels WHEELS --site SITE

Each wheel is unpacked aside and asked for its own options in a process of its own: SGLang and the
router build their argparse parsers, Megatron gives its config dataclasses. Packages that are not
installed here are replaced by stand-ins, since only declarations are read. torch must be installed;
nothing is installed by this script.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import importlib.abc
import importlib.machinery
import json
import subprocess
import sys
import tempfile
import types
import typing
import zipfile
from pathlib import Path
from typing import Any

PLUGINS = Path(__file__).resolve().parents[1] / "slime" / "plugins"
MEGATRON = PLUGINS / "megatron" / "options.json"
"""It also has the options of Megatron-LM that are no config field of megatron-core, or one of
another name (``field``). They are written by hand, and kept.
"""
TARGETS = {
    "sglang": "sglang/options-{}.json",
    "sglang_router": "sglang/router.json",
    "megatron_core": "megatron/options.json",
}
MEGATRON_CONFIGS = {
    "TransformerConfig": "megatron.core.transformer.transformer_config",
    "MLATransformerConfig": "megatron.core.transformer.transformer_config",
    "ModelParallelConfig": "megatron.core.model_parallel_config",
    "OptimizerConfig": "megatron.core.optimizer.optimizer_config",
    "DistributedDataParallelConfig": "megatron.core.distributed.distributed_data_parallel_config",
}
NOT_NEEDED = (
    "transformers",
    "huggingface_hub",
    "openai",
    "pydantic",
    "fastapi",
    "sglang.srt.configs",
    "sglang.srt.layers",
)  # model files say nothing of flags
SIMPLE = (bool, int, float, str, type(None))


class _StandInType(type):
    """Anything that a declaration may do with an absent name: subclass, call, decorate, subscript,
    join.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> Any:
        return super().__new__(mcs, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and not name.endswith("validators__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return (
            args[0]
            if len(args) == 1 and not kwargs and callable(args[0])
            else _stand_in(cls.__name__)
        )

    def __iter__(cls) -> Any:
        return iter(())

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __setitem__(cls, _: Any, __: Any) -> None:
        return None

    def __contains__(cls, _: Any) -> bool:
        return False

    def __len__(cls) -> int:
        return 0

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


def _stand_in(name: str) -> Any:
    return _StandInType(name, (), {})


class _StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


class _AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """First finder of all: stands in for packages that the wheel imports and that are not
    installed.
    """

    def __init__(self, wheel: str) -> None:
        self.wheel = wheel

    def _asked_by_wheel(self) -> bool:
        frame = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None and frame.f_code.co_filename.startswith(self.wheel)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        root = fullname.partition(".")[0]
        installed = (
            root in sys.stdlib_module_names
            or importlib.machinery.PathFinder.find_spec(root) is not None
        )
        # the router's compiled half
        replaced = fullname.startswith(NOT_NEEDED) or fullname.endswith("_rs")
        if (installed and not replaced) or not self._asked_by_wheel():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = _StandInModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, SIMPLE) else None


def _parser_options(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """``{"--flag": {dest, kind, type, nargs, values, default}}`` of one argparse parser."""
    options: dict[str, dict[str, Any]] = {}
    for action in parser._actions:
        long_names = [name for name in action.option_strings if name.startswith("--")]
        if action.dest == "help" or not long_names:
            continue
        entry: dict[str, Any] = {"dest": action.dest, "kind": _action_kind(action)}
        kind = getattr(action.type, "__name__", None)
        if kind in ("int", "float", "human_readable_int"):
            entry["type"] = "loose" if kind == "human_readable_int" else kind
        if action.nargs not in (None, 0):
            entry["nargs"] = action.nargs
        if action.choices and all(isinstance(choice, (str, int)) for choice in action.choices):
            entry["values"] = list(action.choices)
        if action.default is not None and action.default is not argparse.SUPPRESS:
            entry["default"] = _plain(action.default)
        for name in long_names:
            options[name] = entry
    return dict(sorted(options.items()))


def _action_kind(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "toggle"
    if action.nargs == 0:
        return "negative" if getattr(action, "const", True) is False else "switch"
    return "list" if action.nargs in ("+", "*") or isinstance(action.nargs, int) else "value"


def _dataclass_fields(cls: type) -> dict[str, dict[str, Any]]:
    """``{"field_name": {type, default, choices}}`` of the fields that a command line can set."""
    fields = {}
    for field in dataclasses.fields(cls):
        entry = _field_entry(field.type)
        if field.name.startswith("_") or entry is None:
            continue
        default = field.default if field.default is not dataclasses.MISSING else None
        fields[field.name] = {**entry, "default": _plain(default)}
    return fields


def _field_entry(hint: Any) -> dict[str, Any] | None:
    text = str(hint)
    if (
        "Callable" in text
        or "torch.dtype" in text
        or "ContextManager" in text
        or "RecipeConfig" in text
    ):
        return None
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    inner = members[0] if union and len(members) == 1 else hint
    if typing.get_origin(inner) is typing.Literal:
        return {"kind": "value", "choices": list(typing.get_args(inner))}
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        return {"kind": "value", "choices": [member.name for member in inner]}
    if typing.get_origin(inner) in (list, tuple):
        element = typing.get_args(inner)[0]
        return {"kind": "list", "type": element.__name__ if element in (int, float) else "str"}
    if union and len(members) > 1:  # e.g. int | list[int]: an expression, read by the backend
        return {"kind": "value", "type": "loose"}
    if inner is bool:
        return {"kind": "switch"}
    return {"kind": "value", "type": inner.__name__ if inner in (int, float) else "str"}


def describe(package: str) -> dict[str, Any]:
    """Runs in a process of its own, with the unpacked wheel first on the path."""
    if package == "megatron_core":
        fields: dict[str, Any] = {}
        for name, module in MEGATRON_CONFIGS.items():
            for field, entry in _dataclass_fields(
                getattr(importlib.import_module(module), name)
            ).items():
                fields.setdefault(field, entry)
        return dict(sorted(fields.items()))
    importlib.import_module("torch._dynamo")  # whole before stand-ins can confuse its own probes
    sys.meta_path.insert(0, _AbsentPackages(sys.path[0]))
    parser = argparse.ArgumentParser()
    if package == "sglang":
        importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    else:
        importlib.import_module("sglang_router.router_args").RouterArgs.add_cli_args(
            parser, use_router_prefix=False
        )
    return _parser_options(parser)


def _describe_wheel(wheel: Path, site: list[str]) -> None:
    package, version = wheel.name.split("-")[:2]
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                folder, [name for name in archive.namelist() if name.endswith(".py")]
            )
        command = [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            "--describe",
            package,
            "--path",
            folder,
            *site,
        ]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    options = json.loads(result.stdout.rpartition("\n@@")[2])
    if package == "megatron_core":
        options = _with_megatron_lm(options)
    _write(PLUGINS / TARGETS[package].format(version), package, version, options)


def _with_megatron_lm(fields: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the options of the fields, and those of Megatron-LM, which replace the fields that they
    set.
    """
    table: dict[str, dict[str, Any]] = json.loads(MEGATRON.read_text())["options"]
    own = {option: entry for option, entry in table.items() if not entry.get("core")}
    covered = {entry["dest"] for entry in own.values()} | {e.get("field") for e in own.values()}
    options: dict[str, dict[str, Any]] = {}
    for name in sorted(fields.keys() - covered):
        entry = {"core": True, "dest": name, "field": name, **fields[name]}
        option = name.replace("_", "-")
        options[f"--{option}"] = entry
        if entry["kind"] == "switch":
            options[f"--no-{option}"] = {**entry, "kind": "negative"}
    return options | own


def _write(target: Path, package: str, version: str, options: dict[str, Any]) -> None:
    lines = ",\n".join(
        f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in options.items()
    )
    head = f'{{"package": {json.dumps(package)}, "version": {json.dumps(version)}, "options": {{\n'
    target.write_text(f"{head}{lines}\n}}}}\n")
    print(f"{target.name}: {len(options)} options")


def _describe_installed() -> None:
    """Write the table of the installed vLLM."""
    from importlib.metadata import packages_distributions, version

    arguments = importlib.import_module("vllm.engine.arg_utils")
    parsers = importlib.import_module("vllm.utils.argparse_utils")
    parser = parsers.FlexibleArgumentParser()
    arguments.AsyncEngineArgs.add_cli_args(parser)
    package = packages_distributions()["vllm"][0]
    target = PLUGINS / "vllm" / "options.json"
    _write(target, package, version(package), _parser_options(parser))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, help="folder of downloaded wheels")
    parser.add_argument(
        "--site", action="append", default=[], help="folder of extra packages that a wheel needs"
    )
    parser.add_argument("--installed", action="store_true", help="write the table of this vLLM")
    parser.add_argument("--describe", help=argparse.SUPPRESS)
    parser.add_argument("--path", nargs="+", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.describe:
        sys.path[:0] = options.path
        print("\n@@" + json.dumps(describe(options.describe)))
        return
    if options.installed:
        _describe_installed()
        return
    if options.wheels is None:
        parser.error("--wheels FOLDER is needed; the help says how to fill it")
    for wheel in sorted(options.wheels.glob("*.whl")):
        _describe_wheel(wheel, options.site)


if __name__ == "__main__":
    main()
