"""The formats of labels of ``--rm-type code``, and the programs that test a response. See
:mod:`.code`.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SPACE = (
    "from typing import *\n"
    "from collections import *\n"
    "from functools import *\n"
    "from itertools import *\n"
    "from heapq import *\n"
    "from bisect import *\n"
    "import collections, functools, heapq, itertools, math, re, string\n"
)
"""What a function of a response can use without importing it, as on the sites that the code sets
come from.
"""
_SPACE_NAMES: dict[str, Any] = {}
exec(_SPACE, _SPACE_NAMES)
_PEER = Path(__file__).with_name("code_peer.py").read_text(encoding="utf-8")
_HARNESS = """\
import builtins, json, os, resource, sys, threading, types
_order = json.loads({order!r})
resource.setrlimit(resource.RLIMIT_CPU, (_order["cpu"], _order["cpu"] + 1))
builtins.exit = builtins.quit = sys.exit
_module = sys.modules[_order["module"]] = types.ModuleType(_order["module"])
_names = _module.__dict__
"""
_PROGRAM = """\
def converse(reader, writer):
    for part in _order["parts"]:
        exec(compile(part, "<code>", "exec"), _names)
    Peer(reader, writer, _names).serve()
"""
_TESTS = """\
def converse(reader, writer):
    peer = Peer(reader, writer)
    for part in _order["parts"]:
        exec(compile(part, "<prompt>", "exec"), _names)
    for name in _order["names"]:
        try:
            _names[name] = peer.ask(0, "getitem", name)
        except KeyError:
            pass  # the tests say what is missing
    exec(compile(_order["asserts"], "<tests>", "exec"), _names)
    print("\\n" + _order["done"])
"""
_STDIN = """\
_input, (_read, _write) = _order["input"].encode(), os.pipe()
def _feed():
    with open(_write, "wb") as pipe:
        pipe.write(_input)
_feed() if len(_input) <= 65_536 else threading.Thread(target=_feed, daemon=True).start()  # what a pipe can hold
os.dup2(_read, 0)
sys.stdin = open(0, encoding="utf-8", closefd=False)
sys.argv = ["main.py"]
exec(compile(_order["code"], "<code>", "exec"), _names)
"""
_CALL = """\
for _part in _order["parts"]:
    exec(compile(_part, "<code>", "exec"), _names)
_name = _order["function"]
_function = _names[_name] if _name in _names else getattr(_names["Solution"](), _name)
_result = json.dumps(_function(*_order["arguments"]), default=list)
print("\\n" + _order["done"] + _result)
"""


class BadTests(ValueError):
    """A label holds no tests in a known format; the message says what is wrong."""


@dataclass(frozen=True)
class Case:
    """One input and its output: texts for a program, or arguments and a result for a function."""

    given: Any
    expected: Any


@dataclass(frozen=True)
class CodeTests:
    """The tests of one row.

    Attributes:
        asserts: Code that raises if the answer is wrong.
        cases: Inputs and outputs.
        function: Name of the function that ``cases`` call; empty for programs that read the
            standard input.
        prefix: Code that is put before an answer that does not define ``entry``. Before another
            answer it is run for the helpers that it defines, if it is complete.
        entry: Name of the function that ``asserts`` check.
    """

    asserts: str = ""
    cases: tuple[Case, ...] = ()
    function: str = ""
    prefix: str = ""
    entry: str = ""


@dataclass(frozen=True)
class Trial:
    """A program for the sandbox, and the test of what it prints, or the program of the tests that
    judge it.
    """

    program: str
    # What the program prints at its end; empty: everything that it prints is the answer.
    done: str = ""
    case: Case | None = None
    tests: str = ""  # runs beside the program, in a sandbox of its own, and prints ``done``

    def passed(self, stdout: str) -> bool:
        """Whether the output of a program that ended without an error is right."""
        if not self.done:
            assert self.case is not None
            return same_output(stdout, str(self.case.expected))
        _, found, result = stdout.rpartition(f"\n{self.done}")
        if not found or self.case is None:
            return bool(found)
        try:
            return _same_result(json.loads(result), self.case.expected)
        except (ValueError, RecursionError):  # what the program returned may be nested deeply
            return False


def trials(tests: CodeTests, code: str, cpu_seconds: int) -> Iterator[Trial]:
    """Yield the programs that test ``code``, each with its own processor time in seconds."""
    # An answer may be a whole function or the rest of the one that the prompt began.
    prompt = [tests.prefix] if tests.entry and _is_complete(tests.prefix) else []
    before = [_SPACE]
    if tests.entry and re.search(
        rf"^(?:(?:async )?def|class) {re.escape(tests.entry)}\b", code, re.MULTILINE
    ):
        before += prompt
    elif tests.entry:
        code = f"{tests.prefix}\n{code}"
    # Marks where the result begins. A program may find it and print it, but what follows is
    # compared all the same.
    done = hashlib.blake2b(f"{code}\0{tests}".encode(), digest_size=16).hexdigest()
    alone: dict[str, Any] = {"cpu": cpu_seconds, "module": "solution", "parts": [*before, code]}
    order = {**alone, "done": done}
    # Asserts run in another sandbox and call the program: it cannot change what they mean.
    if tests.asserts:
        names = _names_of_program(tests, code, prompt)
        judge = {
            **order,
            "module": "tests",
            "parts": [_SPACE, *prompt],
            "names": names,
            "asserts": tests.asserts,
        }
        program = _program(_PROGRAM, alone)
        yield Trial(_PEER + program, done, tests=_PEER + _program(_TESTS, judge))
    # Inputs go into the program, and its output comes out to be compared here.
    for case in tests.cases:
        if tests.function:
            more = {"function": tests.function, "arguments": case.given}
            yield Trial(_program(_CALL, {**order, **more}), done, case)
        else:
            more = {"module": "__main__", "code": code, "input": case.given}
            yield Trial(_program(_STDIN, {"cpu": cpu_seconds, **more}), "", case)


def _names_of_program(tests: CodeTests, code: str, prompt: Sequence[str]) -> list[str]:
    """Return the names that the tests use and only the program defines.

    All other names mean in the tests what they mean without the program, so that it cannot replace
    ``sorted`` or a helper of the prompt. If every name of the tests has such a meaning (``assert
    count(5) == 3``), those count that the program defines.
    """
    # Names of the program are asked for over the pipe, all others are those of the tests.
    used = {node.id for node in ast.walk(ast.parse(tests.asserts)) if isinstance(node, ast.Name)}
    used -= _defined(tests.asserts, everywhere=True)
    own = used - {*vars(builtins), *_SPACE_NAMES}.union(*map(_defined, prompt)) | (
        {tests.entry} & used
    )
    return sorted(own or used & _defined(code))


def _defined(code: str, everywhere: bool = False) -> set[str]:
    """Return the names that a text of Python defines at its top level, or everywhere in it."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        else:
            targets = ast.walk(node) if isinstance(node, ast.Assign | ast.AnnAssign) else [node]
            names.update(
                n.id for n in targets if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            )
    return names


def _is_complete(code: str) -> bool:
    try:
        compile(code, "<prompt>", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _program(body: str, order: Mapping[str, Any]) -> str:
    return _HARNESS.format(order=json.dumps(order)) + body


def read_tests(label: object, metadata: Mapping[str, object]) -> CodeTests:
    """Read the tests of a row.

    These formats are known, each also as JSON text:

    * asserts as a text or a list of texts (MBPP);
    * ``{"test": code, "entry_point": name}``, where the code defines ``check(candidate)``
      (HumanEval), also with ``prompt``, the beginning of the answer, and ``test_setup_code``;
    * ``{"inputs": [...], "outputs": [...]}``, with ``fn_name`` if a function is called (APPS,
      TACO);
    * a list of ``{"input": ..., "output": ..., "testtype": "stdin" or "functional"}``
      (LiveCodeBench). The name of the function is ``func_name`` or ``fn_name`` of the metadata.

    Raises:
        BadTests: The label has another format.
    """
    # By the form of the value, from the simplest to the one with most parts.
    value = _decoded(label)
    if isinstance(value, str) and value.strip():
        return CodeTests(asserts=_compiled(value))
    if isinstance(value, list) and value and all(isinstance(entry, str) for entry in value):
        return CodeTests(asserts=_compiled("\n".join(value)))
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        return _listed_cases(value, metadata)
    if isinstance(value, Mapping) and "test" in value:
        return _human_eval(value)
    if isinstance(value, Mapping) and "inputs" in value and "outputs" in value:
        return _in_and_out(value)
    raise BadTests(
        f"the label is {'missing' if value is None else repr(str(value)[:80])}; it needs asserts "
        "(a text or a list), an object with test and entry_point, an object with inputs and "
        "outputs, or a list of objects with input and output"
    )


def _decoded(label: object) -> Any:
    if isinstance(label, str) and label.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(label)
        except (ValueError, RecursionError) as error:
            raise BadTests(f"the label looks like JSON, but is not: {error}") from error
    return label


def _compiled(code: str) -> str:
    try:
        compile(code, "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        raise BadTests(f"the tests are not Python: {error}") from error
    if "assert" not in code and "check" not in code and "raise" not in code:
        raise BadTests(f"the tests contain no assert: {code[:80]!r}")
    return code


def _human_eval(label: Mapping[str, Any]) -> CodeTests:
    entry = label.get("entry_point") or ""
    code = f"{label.get('test_setup_code') or ''}\n{label['test']}\n"
    if "def check(" in code:
        if not entry:
            raise BadTests("the tests define check(candidate), but the label has no entry_point")
        code += f"\ncheck({entry})\n"
    return CodeTests(
        asserts=_compiled(code), prefix=str(label.get("prompt") or ""), entry=str(entry)
    )


def _in_and_out(label: Mapping[str, Any]) -> CodeTests:
    inputs = label["inputs"]
    outputs = label["outputs"]
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or len(inputs) != len(outputs)
        or not inputs
    ):
        raise BadTests(
            "inputs and outputs must be lists of the same length with at least one entry"
        )
    name = str(label.get("fn_name") or "")
    if name:
        if not all(isinstance(given, list) for given in inputs):
            raise BadTests(
                f"fn_name is {name}, so each entry of inputs must be a list of arguments"
            )
        return CodeTests(cases=tuple(map(Case, inputs, outputs)), function=name)
    return CodeTests(
        cases=tuple(Case(_joined(i), _joined(o)) for i, o in zip(inputs, outputs, strict=True))
    )


def _listed_cases(label: Sequence[Mapping[str, Any]], metadata: Mapping[str, object]) -> CodeTests:
    if not all("input" in case and "output" in case for case in label):
        raise BadTests("each case needs input and output")
    if all(case.get("testtype") != "functional" for case in label):
        return CodeTests(
            cases=tuple(Case(_joined(case["input"]), _joined(case["output"])) for case in label)
        )
    # LiveCodeBench keeps the name in the metadata.
    name = str(metadata.get("func_name") or metadata.get("fn_name") or "")
    if not name:
        raise BadTests(
            "functional cases need the name of the function: func_name in the row's metadata"
        )
    try:
        cases = tuple(
            Case(
                [json.loads(line) for line in case["input"].split("\n") if line.strip()],
                json.loads(case["output"]),
            )
            for case in label
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise BadTests(
            f"input of a functional case is one JSON value a line, output one JSON value: {error}"
        ) from error
    return CodeTests(cases=cases, function=name)


def _joined(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs have the same words in the same lines. Empty lines at the end and spaces
    do not count, and numbers with a decimal point may differ by a millionth."""
    # Words and lines count, the space between them does not.
    ours, theirs = (
        [line.split() for line in text.strip().splitlines()] for text in (found, expected)
    )
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if not any(mark in f"{found}{expected}" for mark in ".eE"):
        return False
    try:
        return math.isclose(float(found), float(expected), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def _same_result(found: Any, expected: Any) -> bool:
    """Whether a function returned what was expected. APPS wraps some results in a list of one
    entry.
    """
    if isinstance(expected, list) and len(expected) == 1 and _same_value(found, expected[0]):
        return True
    return _same_value(found, expected)


def _same_value(found: Any, expected: Any) -> bool:
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same_value, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            _same_value(found[key], expected[key]) for key in found
        )
    if isinstance(found, float) or isinstance(expected, float):
        numbers = isinstance(found, int | float) and isinstance(expected, int | float)
        return numbers and math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9)
    return bool(found == expected)
