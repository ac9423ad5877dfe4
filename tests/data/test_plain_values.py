"""Files of torch.save are read without running code."""

from __future__ import annotations

import datetime
import os
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.data.plain_values import UnsafeFileError, load_plain, plain


class RunsCode:
    """What a hostile file holds: unpickling it calls ``os.mkdir``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


class Marked(list[int]):
    pass


class Ratio(float):
    pass


class Named(NamedTuple):
    number: int
    name: str


class Color(str, Enum):  # noqa: UP042 - the form that users still write
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Own:
    def __init__(self) -> None:
        self.value = 3


def saved(value: Any, path: Path, **more: Any) -> Path:
    torch.save(value, path, **more)
    return path


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**1000), 2**1000)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


@given(values)
@settings(max_examples=60, deadline=None)
def test_plain_values_come_back(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("plain") / "state.pt"
    assert load_plain(saved(value, path)) == value


DTYPES = (
    "bool",
    "uint8",
    "int16",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "<U5",
    "S3",
    "M8[s]",
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays_and_scalars_come_back(tmp_path: Path, dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    loaded = load_plain(saved({"array": array, "scalar": array[1, 1]}, tmp_path / "a.pt"))
    assert loaded["array"].dtype == array.dtype and np.array_equal(loaded["array"], array)
    assert loaded["scalar"] == array[1, 1] and type(loaded["scalar"]) is type(array[1, 1])


def test_what_samples_hold_comes_back(tmp_path: Path) -> None:
    from PIL import Image

    given: dict[str, Any] = {
        "object array": np.array([{"a": 1}, None], dtype=object),
        "tensor": torch.arange(3),
        "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "took": datetime.timedelta(seconds=3),
        "numbers": [Decimal("0.1"), Fraction(1, 3), complex(1, 2), float("nan")],
        "sets": [{1, 2}, frozenset({3})],
        "containers": [OrderedDict(b=1), Counter("aab"), b""],
        "path": Path("/a/b"),
    }
    loaded = load_plain(
        saved({**given, "image": Image.new("RGB", (2, 3), (1, 2, 3))}, tmp_path / "a.pt")
    )
    assert loaded["image"].getpixel((1, 2)) == (1, 2, 3)
    assert torch.equal(loaded["tensor"], given["tensor"]) and list(loaded["object array"]) == [
        {"a": 1},
        None,
    ]
    for name in ("when", "took", "sets", "containers", "path"):
        assert loaded[name] == given[name], name


def test_values_of_other_types_are_written_as_plain_ones(tmp_path: Path) -> None:
    value: dict[str, Any] = {"a": defaultdict(list, {"b": [deque([1]), (defaultdict(int), 2)]})}
    value |= {"tokens": [1, 2], "pair": (1, 2)}
    expected: dict[str, Any] = {"a": {"b": [[1], ({}, 2)]}, "tokens": [1, 2], "pair": (1, 2)}
    value |= {
        "list": Marked([1, 2]),
        "empty": Marked(),
        "named": Named(1, "b"),
        "many": [Named(1, "b")],
    }
    value |= {
        "color": Color.RED,
        "level": Level.HIGH,
        "colors": {"first": (Color.RED,)},
        "ratio": Ratio(0.5),
    }
    expected |= {
        "list": [1, 2],
        "empty": [],
        "named": (1, "b"),
        "many": [(1, "b")],
        "color": "red",
        "level": 3,
    }
    expected |= {"colors": {"first": ("red",)}, "ratio": 0.5}
    loaded = load_plain(saved(plain(value), tmp_path / "a.pt"))
    assert (
        type(loaded["color"]) is str
        and type(loaded["level"]) is int
        and type(loaded["ratio"]) is float
    )
    assert plain(np.float64(1.5)).__class__ is np.float64
    assert loaded == expected and type(loaded["a"]) is dict and type(loaded["pair"]) is tuple


@pytest.mark.parametrize("more", [{}, {"_use_new_zipfile_serialization": False}])
def test_a_file_that_would_run_code_does_not(tmp_path: Path, more: dict[str, Any]) -> None:
    target = tmp_path / "made by the file"
    path = saved({"metadata": [RunsCode(target)]}, tmp_path / "state.pt", **more)
    with pytest.raises(UnsafeFileError, match=r"state.pt .*mkdir"):
        load_plain(path)
    assert not target.exists()
    torch.load(path, weights_only=False)
    assert target.exists()  # the file is as hostile as it should be


def test_own_classes_are_named_and_can_be_allowed(tmp_path: Path) -> None:
    path = saved({"state": Own()}, tmp_path / "state.pt")
    with pytest.raises(UnsafeFileError, match=r"test_plain_values.Own.*add_safe_globals"):
        load_plain(path)
    with torch.serialization.safe_globals([Own]):
        assert load_plain(path)["state"].value == 3


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 cut"])
def test_other_files_are_an_error_with_the_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(UnsafeFileError, match=r"state.pt"):
        load_plain(tmp_path / "state.pt")
