"""Labels with asserts: what a program does cannot reach the verdict, and right programs of every
form are paid.
"""

from __future__ import annotations

from typing import Any

import pytest
from make_args import make_args

from slime.data.sample import Sample
from slime.plugins.agents.sandbox import Sandbox, SandboxUnavailable
from slime.rollout.rm_hub import async_rm, check_label

pytestmark = pytest.mark.real

MBPP = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
HUMAN_EVAL = {
    "prompt": "def add(a: int, b: int) -> int:\n    '''Add.'''\n",
    "test": "def check(candidate):\n"
    "    assert candidate(1, 2) == 3\n"
    "    assert candidate(-1, 1) == 0\n",
    "entry_point": "add",
}
CLOSE = [
    "assert abs(half(5) - 2.5) < 1e-9", "assert sorted(listed(3)) == [0, 1, 2]", "assert half(4) == 2.0",
    "assert half(5) % 2 == 0.5", "assert round(half(5), 1) == 2.5", "assert 2 in listed(3)",
    "assert half(4) > 1 and half(4) < 3",
]  # fmt: skip


async def outcome(code: str, label: Any) -> str:
    assert check_label("code", label, {}) is None
    sample = Sample(response=f"```python\n{code}\n```", label=label, index=1)
    reward = await async_rm(make_args(rm_type="code", code_timeout=2.0), sample)
    assert reward == float(sample.metadata["code_outcome"] == "passed")
    return str(sample.metadata["code_outcome"])


@pytest.fixture(scope="module", autouse=True)
def isolated() -> None:
    try:
        Sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


FRAMES = """
import os, sys
frame = sys._getframe()
while frame:
    for scope in (frame.f_globals, frame.f_locals):
        order = scope.get("_order") or {}
        {act}
    frame = frame.f_back
def add(a, b): return 0
"""
# An object that claims to equal everything, that its difference from anything is 0, and so on.
YES = """
class Yes{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __hash__(self): return 3
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __float__ = __sub__
    def __mod__(self, other): return self
    def __abs__(self): return 0
    def __contains__(self, other): return True
    def __bool__(self): return True
    def __instancecheck__(self, kind): return True
def add(a, b): return Yes()
half = add
def listed(n): return Yes()
"""
FORGED = """
import os, pickle, struct
class Sent:
    def __init__(self, code): self.code = code
def forge(*_):
    for descriptor in range(3, 64):
        try: os.write(descriptor, {sent})
        except OSError: pass
    os._exit(0)
add = forge
"""
CHEATS = {
    "prints the mark": FRAMES.replace("{act}", "print(chr(10) + str(order.get('done'))); sys.stdout.flush()")
    + "os._exit(0)",
    "changes the tests": FRAMES.replace("{act}", "order.get('parts', [0])[-1:] = ['']; order['asserts'] = ''"),
    "replaces exec": "import builtins\nbuiltins.exec = lambda *a: None",
    "replaces compile": "import builtins\nbuiltins.compile = lambda *a, **k: 'pass'",
    "equals everything": YES.replace("{base}", ""),
    "equals everything as an int": YES.replace("{base}", "(int)"),
    "equals everything as a list": YES.replace("{base}", "(list)"),
    "equals everything as a str": YES.replace("{base}", "(str)"),
    "ends when it is called": "import os\ndef add(a, b): os._exit(0)",
    "leaves when it is called": "def add(a, b): raise SystemExit(0)",
    "ends at once": "import os\nos._exit(0)",
    "an exception that ends the tests":
        "class Leave(SystemExit): pass\n"
        "def add(a, b): raise Leave(0)",
    "replaces print":
        "import builtins, sys\n"
        "builtins.print = lambda *a, **k: None\n"
        "sys.stdout = None\n"
        "add = lambda a, b: 0",
    "replaces what reads":
        "import sys\n"
        "for m in list(sys.modules.values()):\n"
        "    getattr(m, '__dict__', {}).update(AssertionError=None)",
    "looks for the asserts":
        "import gc, re\n"
        "texts = ' '.join(repr(o) for o in gc.get_objects() if isinstance(o, dict))\n"
        "def add(a, b):\n"
        "    found = re.search(rf'\\({a}, {b}\\) == (\\d+)', texts)\n"
        "    return int(found[1]) if found else None",
    "forges bytes": FORGED.replace("{sent}", "struct.pack('>Q', 9) + pickle.dumps(1)[:9]"),
    "forges a reply of a class": FORGED.replace(
        "{sent}", "(lambda d: struct.pack('>Q', len(d)) + d)(pickle.dumps(('value', print, ())))"
    ),
    "forges the end": FORGED.replace("{sent}", "(lambda d: struct.pack('>Q', len(d)) + d)(pickle.dumps(('error', "
    "['SystemExit'], (0,))))"),
    "a huge message": FORGED.replace("{sent}", "struct.pack('>Q', 2 ** 62) + b'x'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
async def test_a_program_that_does_not_solve_its_task_is_not_paid(name: str) -> None:
    for label in (MBPP, HUMAN_EVAL):
        assert await outcome(CHEATS[name], label) != "passed"


@pytest.mark.parametrize(
    "code",
    [
        YES.replace("{base}", ""),
        *(
            pytest.param(YES.replace("{base}", base), marks=pytest.mark.long)
            for base in ("(int)", "(float)", "(list)")
        ),
        "abs = lambda x: 0\n"
        "sorted = lambda x: [0, 1, 2]\n"
        "half = lambda x: 7\n"
        "listed = lambda x: []",
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.sorted = lambda x: [0, 1, 2]\n"
        "half = listed = lambda x: 7.0",
        "from fractions import Fraction\n"
        "Fraction.__eq__ = lambda a, b: True\n"
        "half = lambda x: Fraction(1, 3)\n"
        "listed = lambda x: []",
    ],
)  # fmt: skip
async def test_a_program_cannot_replace_what_its_tests_use(code: str) -> None:
    for test in CLOSE:
        assert await outcome(code, test) != "passed"


async def test_a_block_of_a_program_does_not_swallow_the_verdict() -> None:
    code = (
        "class C:\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *error): return True\n"
    )
    assert await outcome(code, "with C() as c:\n    assert False\n") == "wrong"


async def test_a_program_cannot_replace_a_helper_of_its_prompt() -> None:
    label = {
        "prompt": "def value(p, x):\n"
        "    return p[0] + p[1] * x\n"
        "\n"
        "def zero(p):\n"
        "    '''Where is value(p, x) 0?'''\n",
        "test": "def check(candidate):\n"
        "    p = [6, -2]\n"
        "    assert abs(value(p, candidate(p))) < 1e-4\n",
        "entry_point": "zero",
    }
    assert await outcome("def zero(p):\n    return -p[0] / p[1]\n", label) == "passed"
    assert await outcome("    return -p[0] / p[1]\n", label) == "passed"
    assert await outcome("value = lambda p, x: 0\ndef zero(p):\n    return 1\n", label) != "passed"
    assert await outcome("    return 1\nvalue = lambda p, x: 0\n", label) != "passed"


async def test_a_program_cannot_empty_what_it_is_given() -> None:
    tests = ["x = [3, 1, 2]", "assert sort(x) == sorted(x)"]
    assert await outcome("def sort(x):\n    return sorted(x)", tests) == "passed"
    assert await outcome("def sort(x):\n    x.clear()\n    return []", tests) == "wrong"


RIGHT = {
    "several functions": ("def f(x): return g(x) + 1\ndef g(x): return 2 * x",
        "assert f(2) == 5\n"
        "assert g(2) == 4"),
    "a class": (
        "class Stack:\n"
        "    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n"
        "    @property\n"
        "    def top(self): return self.items[-1]\n"
        "    def __iter__(self): return iter(self.items)\n",
        "s = Stack()\n"
        "s.push(1)\n"
        "s.push(2)\n"
        "assert len(s) == 2 and s.top == 2 and s.items == [1, 2]\n"
        "assert list(s) == [1, 2]\n"
        "assert s.pop() == 2\n"
        "assert isinstance(s, Stack)\n"
        "s.items = []\n"
        "assert len(s) == 0 and not s",
    ),
    "objects that are compared": (
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True, order=True)\n"
        "class P:\n"
        "    x: int\n"
        "    y: int = 0\n"
        "    def __add__(self, other): return P(self.x + other.x, self.y + other.y)\n",
        "assert P(1, 2) + P(3) == P(4, 2)\n"
        "assert P(1) != P(2) and P(1) < P(2)\n"
        "assert str(P(1)) == 'P(x=1, y=0)'\n"
        "assert len({P(1), P(1)}) == 1\n"
        "assert [P(1), P(2)] == [P(1), P(2)]",
    ),
    "objects in arithmetic and in a block": (
        "class M:\n"
        "    def __init__(self, x): self.x = x\n"
        "    def __mul__(self, k): return M(self.x * k)\n"
        "    def __eq__(self, other): return self.x == other.x\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *error): self.x = 0",
        "assert M(1) * 2 == M(2)\nwith M(3) as m:\n    assert m.x == 3\nassert m.x == 0",
    ),
    "an enumeration": (
        "from enum import Enum\nclass Color(Enum):\n    RED = 'red'\ndef f(): return Color.RED",
        "assert f() is Color.RED and f() == Color('red') and f().value == 'red'",
    ),
    "a generator": (
        "def count():\n"
        "    n = 0\n"
        "    while True:\n"
        "        yield n\n"
        "        n += 1\n"
        "def upto(n): yield from range(n)",
        "from itertools import islice\n"
        "assert list(upto(3)) == [0, 1, 2]\n"
        "assert list(islice(count(), 3)) == [0, 1, 2]\n"
        "g = upto(1)\n"
        "assert next(g) == 0\n"
        "try:\n"
        "    next(g)\n"
        "    assert False\n"
        "except StopIteration:\n"
        "    pass",
    ),
    "exceptions": (
        "class Bad(ValueError): pass\n"
        "def f(x):\n"
        "    if x < 0: raise Bad('negative', x)\n"
        "    if x == 0: return 1 / 0\n"
        "    return x",
        "for bad, kind in ((-1, Bad), (-1, ValueError), (0, ZeroDivisionError)):\n"
        "    try:\n"
        "        f(bad)\n"
        "    except kind as e:\n"
        "        assert kind is ZeroDivisionError or e.args == ('negative', bad)\n"
        "    else:\n"
        "        raise AssertionError\n"
        "assert f(1) == 1",
    ),
    "unittest": (
        "def f(x):\n    if not x: raise KeyError(x)\n    return 0.1 + 0.2",
        "import unittest\nt = unittest.TestCase()\nt.assertAlmostEqual(f(1), 0.3)\nwith "
        "t.assertRaises(KeyError):\n    f(0)\nassert True",
    ),
    "floats": ("def f(x): return x / 3",
        "import math\n"
        "assert abs(f(1) - 0.333333) < 1e-5 and math.isclose(f(3), 1)"),
    "plain values": (
        "from collections import Counter, OrderedDict, defaultdict, deque, namedtuple\n"
        "from decimal import Decimal\n"
        "from fractions import Fraction\n"
        "from enum import IntEnum\n"
        "import datetime\n"
        "P = namedtuple('P', 'x y')\n"
        "class E(IntEnum):\n"
        "    A = 1\n"
        "def f(n):\n"
        "    d = defaultdict(list)\n"
        "    d['a'].append(1)\n"
        "    return [None, True, 1, 2.5, 1j, 'é', b'x', (1,), {1}, frozenset([1]), {'a': [1]}, "
        "Counter('aa'), OrderedDict(a=1), d, deque([1]), P(1, 2), Decimal('1.5'), Fraction(1, "
        "2), range(3), E.A, datetime.date(2024, 1, 5), [[1, [2]]]][n]",
        "import datetime\n"
        "from decimal import Decimal\n"
        "from fractions import Fraction\n"
        "from collections import Counter, deque\n"
        "want = [None, True, 1, 2.5, 1j, 'é', b'x', (1,), {1}, frozenset([1]), {'a': [1]}, "
        "Counter('aa'), {'a': 1}, {'a': [1]}, deque([1]), (1, 2), Decimal('1.5'), Fraction(1, "
        "2), range(3), 1, datetime.date(2024, 1, 5), [[1, [2]]]]\n"
        "for n, value in enumerate(want):\n"
        "    assert f(n) == value, n\n"
        "assert f(0) is None and f(1) is True\n"
        "assert isinstance(f(4), complex) and type(f(10)) is dict",
    ),
    "in place": (
        "def reverse(x): x.reverse()\ndef put(d, k, v): d[k] = v",
        "x = [1, 2, 3]\n"
        "reverse(x)\n"
        "assert x == [3, 2, 1]\n"
        "d = {}\n"
        "put(d, 'a', [1])\n"
        "assert d == {'a': [1]}\n"
        "m = [[1, 2], [3]]\n"
        "assert reverse(m) is None and m == [[3], [1, 2]]",
    ),
    "functions of the tests": (
        "def apply(f, xs, key=None): return sorted(map(f, xs), key=key)\n"
        "def check(x, kind): return isinstance(x, kind)",
        "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]\n"
        "assert apply(abs, [-1, 2], key=lambda x: -x) == [2, 1]\n"
        "assert check(1, int) and not check('a', int)",
    ),
    "functions that are returned": (
        "def adder(n):\n"
        "    def add(x, *more, by=1): return (x + n + sum(more)) * by\n"
        "    return add\n"
        "def twice(f): return lambda x: f(f(x))",
        "assert adder(2)(3) == 5 and adder(2)(3, 4, by=2) == 18\n"
        "assert twice(adder(1))(1) == 3 and twice(lambda x: 2 * x)(1) == 4\n"
        "assert callable(adder(1)) and adder.__name__ == 'adder'",
    ),
    "names of the standard library": ("def count(xs): return len(xs)",
        "assert count([1, 2]) == 2\n"
        "assert count([]) == 0"),
    "names that are built in": ("def sum(xs): return 6 if xs else 0",
        "assert sum([1, 2, 3]) == 6\n"
        "assert sum([]) == 0"),
    "values of the program": ("import math\nLIMIT = 3\ndef f(): return LIMIT",
        "assert f() == LIMIT == 3\n"
        "assert math.pi > 3"),
    "a solution class": (
        "class Solution:\n"
        "    def add(self, a, b): return a + b", "assert Solution().add(1, "
    "2) == 3"),
    "much data": ("def f(x): return x + x", "x = list(range(100_000))\nassert f(x) == x + x"),
    "prints": (
        "print('hello')\n"
        "def f():\n"
        "    print('x' * 100_000)\n"
        "    return 1", "assert f() == 1"),
    "a program as a script": (
        "def f(): return 1\n"
        "if __name__ == '__main__':\n"
        "    print(input())", "assert f() == 1"),
    "recursion": ("def f(n): return 1 if n == 0 else n * f(n - 1)", "assert f(500) % 7 == 0"),
    "a nested answer": (
        "def f(n):\n"
        "    x = []\n"
        "    for _ in range(n): x = [x]\n"
        "    return x", "assert "
    "str(f(50)) == '[' * 51 + ']' * 51"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
async def test_a_right_program_is_paid(name: str) -> None:
    assert await outcome(*RIGHT[name]) == "passed"


async def test_objects_that_cannot_cross_are_an_error() -> None:
    """as documented: the program cannot look into instances of classes that the tests define"""
    tests = "class Node:\n    value = 5\nassert f(Node()) == 5"
    assert await outcome("def f(node): return node.value", tests) == "error"
    assert (
        await outcome("def f(node): return node", "class Node: pass\nn = Node()\nassert f(n) is n")
        == "passed"
    )
