"""The table of what fits on one GPU is what ``slime plan`` says today."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fits_page", ROOT / "tools" / "fits_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fits_page"] = module
    spec.loader.exec_module(module)
    return module


def test_the_table_of_the_docs_is_todays() -> None:
    made = tool()
    text = made.PAGE.read_text(encoding="utf-8")
    assert made.page(text) == text, "run python tools/fits_page.py"
