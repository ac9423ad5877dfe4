"""Weight updates by handle: what arrives is what was sent, and nothing that a stranger sends runs
code.
"""

from __future__ import annotations

import ast
import base64
import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served_engine import Served, served

import slime.plugins.embedded
from slime.engines.payload import Bucket, handles
from slime.plugins.embedded.tensor_wire import read_tensors
from slime.plugins.http.server import BadRequest


def bucket() -> Bucket:
    tensors = [
        ("a", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
        ("b", torch.tensor(3.5, dtype=torch.bfloat16)),
        ("c", torch.ones(0, 4)),
        ("d", torch.arange(5)),
    ]
    return Bucket(0, tensors, last=True)


def test_what_arrives_is_what_was_sent() -> None:
    sent = bucket()
    expected = {name: tensor.clone() for name, tensor in sent.tensors}
    arrived = dict(read_tensors(handles(sent)))
    assert list(arrived) == list(expected)
    for name, tensor in expected.items():
        assert arrived[name].dtype == tensor.dtype and torch.equal(arrived[name], tensor)
    sent.flat.fill_(0)  # type: ignore[union-attr]
    assert not arrived["a"].any(), "the receiver has a copy, not the sender's memory"


def test_the_shared_file_goes_with_its_last_user() -> None:
    sent = bucket()
    body = handles(sent)
    file = Path("/dev/shm") / body["buffer"]["name"].lstrip("/")
    arrived = read_tensors(body)
    sent.tensors.clear()
    sent.flat = None
    assert file.exists() and arrived[0][1][1, 2] == 5
    del arrived
    assert not file.exists()


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "pickle": lambda b: b.update(load_format="flattened_bucket"),
    "no buffer": lambda b: b.pop("buffer"),
    "buffer is text": lambda b: b.update(buffer="x"),
    "tensors is text": lambda b: b.update(tensors="x"),
    "unknown kind": lambda b: b["buffer"].update(kind="file"),
    "kind is a list": lambda b: b["buffer"].update(kind=[]),
    "relative name": lambda b: b["buffer"].update(name="/../etc/passwd"),
    "another name": lambda b: b["buffer"].update(name="/etc/passwd"),
    "no such file": lambda b: b["buffer"].update(name="/torch_1_1_999"),
    "manager is no socket": lambda b: b["buffer"].update(manager="/etc/passwd"),
    "manager with NUL": lambda b: b["buffer"].update(manager="/tmp/\0x"),
    "beyond the file": lambda b: b["buffer"].update(
        storage_nbytes=b["buffer"]["storage_nbytes"] + 4096
    ),
    "beyond the storage": lambda b: b["buffer"].update(offset=b["buffer"]["storage_nbytes"]),
    "negative size": lambda b: b["buffer"].update(nbytes=-1),
    "size is a bool": lambda b: b["buffer"].update(nbytes=True),
    "size is a float": lambda b: b["buffer"].update(nbytes=64.0),
    "tensor beyond the buffer": lambda b: b["tensors"][0].update(offset=2**40),
    "tensor at a negative place": lambda b: b["tensors"][0].update(offset=-4),
    "shape and bytes differ": lambda b: b["tensors"][0].update(shape=[3, 3]),
    "negative shape": lambda b: b["tensors"][0].update(shape=[-2, -3]),
    "huge shape": lambda b: b["tensors"][0].update(shape=[2**62, 2**62]),
    "shape is text": lambda b: b["tensors"][0].update(shape="23"),
    "no dtype": lambda b: b["tensors"][0].update(dtype="hub"),
    "dotted dtype": lambda b: b["tensors"][0].update(dtype="hub.os"),
    "dtype is a list": lambda b: b["tensors"][0].update(dtype=["float32"]),
    "no name": lambda b: b["tensors"][0].pop("name"),
    "entry is a number": lambda b: b["tensors"].append(5),
    "cuda handle of no GPU": lambda b: b["buffer"].update(kind="cuda_ipc", device="GPU-0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_anything_else_is_a_bad_request(what: str) -> None:
    sent = bucket()
    body = copy.deepcopy(handles(sent))
    WRONG[what](body)
    with pytest.raises(BadRequest):
        read_tensors(body)


# --- over HTTP -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Served]:
    with served(tiny_llama) as one:
        yield one


class Call:
    """Pickles to ``module.name(*arguments)``, also for dotted names."""

    def __init__(self, module: str, name: str, *arguments: Any) -> None:
        self.parts = module, name, arguments

    def dump(self) -> bytes:
        module, name, arguments = self.parts
        function = _string(module) + _string(name) + b"\x93"  # STACK_GLOBAL
        return b"\x80\x04" + function + pickle.dumps(arguments, protocol=0)[:-1] + b"R."


def _string(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def exploits(file: Path) -> dict[str, bytes]:
    """Pickles that ran code, or ended the model's thread, when the engine unpickled requests."""
    touch = f"touch {file}"
    inner = Call("os", "system", touch).dump()
    return {
        "torch.hub:os.system": Call("torch.hub", "os.system", touch).dump(),
        "torch.serialization:os.system": Call("torch.serialization", "os.system", touch).dump(),
        "multiprocessing.util:os.system": Call("multiprocessing.util", "os.system", touch).dump(),
        "torch.storage:_load_from_bytes": Call("torch.storage", "_load_from_bytes", inner).dump(),
        "torch._utils:sys.exit": Call("torch._utils", "sys.exit", 3).dump(),
        "plain": inner,
    }


@pytest.mark.parametrize("name", list(exploits(Path("x"))))
@pytest.mark.parametrize("load_format", [None, "flattened_bucket", "handles", "direct"])
def test_pickles_are_refused_and_run_nothing(
    engine: Served, tmp_path: Path, name: str, load_format: str | None
) -> None:
    file = tmp_path / "made-by-a-pickle"
    payload = exploits(file)[name]
    if name != "torch._utils:sys.exit" and "storage" not in name:
        pickle.loads(payload)  # the exploit is a working one
        assert file.exists()
        file.unlink()
    before = engine.greedy()
    assert engine.ask("/begin_weight_update", {})[0] == 200
    entry = base64.b64encode(payload).decode()
    body = {
        "serialized_named_tensors": [entry],
        "load_format": load_format,
        "buffer": entry,
        "tensors": entry,
    }
    status, answer = engine.ask("/update_weights_from_tensor", body)
    assert status == 400 and not file.exists(), answer
    assert engine.ask("/end_weight_update", {})[0] == 200
    assert engine.greedy() == before


def test_the_engine_has_no_unpickler() -> None:
    """Neither a pickle module nor torch.load is named anywhere in the embedded engine."""
    folder = Path(slime.plugins.embedded.__file__).parent
    found = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [ast.unparse(node.func)] if isinstance(node, ast.Call) else []
            runs_code = ("torch.load", "eval", "exec")
            found += [
                f"{path.name}: {name}" for name in names if "ickl" in name or name in runs_code
            ]
    assert not found


def test_no_name_of_any_module_is_resolved() -> None:
    """Every place of a request that holds a string, with dotted names of loaded modules in it."""
    sent = bucket()
    names = [
        f"{module}.{name}"
        for module in sorted(sys.modules)[::10]
        for name in ("os.system", "sys.exit", "exit")
    ]
    body = handles(sent)
    for number, name in enumerate(names):
        changed = copy.deepcopy(body)
        place = number % 4
        if place == 0:
            changed["tensors"][0]["dtype"] = name
        elif place == 1:
            changed["buffer"]["kind"] = name
        elif place == 2:
            changed["load_format"] = name
        else:
            changed["buffer"]["name"] = name
        with pytest.raises(BadRequest):
            read_tensors(changed)


def test_a_command_that_exits_does_not_end_the_models_thread(engine: Served) -> None:
    from slime.utils.async_utils import run

    before = engine.greedy()
    for error in (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration()):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(RuntimeError, match=type(error).__name__):
            run(engine.loaded.engine.call(fail))
    assert engine.greedy() == before
