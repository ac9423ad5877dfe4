"""The notebook of examples/notebook: what is saved in it, and a run of all its cells, shortened to
two steps.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from example_scripts import EXAMPLES

NOTEBOOK = EXAMPLES / "notebook" / "first_run.ipynb"
STEPS = "8"


def outputs(cells: list[Any], kind: str) -> list[str]:
    """All outputs of a kind, such as ``text/html``; ``text`` is what was printed."""
    made = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    return [
        "".join(o["text"] if kind == "text" else o["data"][kind])
        for o in made
        if kind in o or kind in o.get("data", {})
    ]


def check_outputs(cells: list[Any]) -> None:
    (picture,) = outputs(cells, "image/png")
    assert picture.startswith("iVBOR")
    tables = [
        html
        for html in outputs(cells, "text/html")
        if "before<table>" in html and "after<table>" in html
    ]
    assert len(tables) == 3 and all(
        re.search(r"<code>.+</code>.*<td>[01]\.\d\d</td>", html) for html in tables
    )
    printed = "".join(outputs(cells, "text"))
    assert "eval at 0" in printed and re.search(r"step (\d+)/\1 ", printed), (
        "it shows its progress to the last step"
    )


def test_the_notebook_is_saved_with_its_outputs() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    check_outputs(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), (
        "it was run from top to bottom"
    )
    assert len(text) < 200_000 and not re.search(r"/root|/home|/tmp", text)
    assert f"step {STEPS}/{STEPS} " in text


@pytest.mark.long
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs(smollm2: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (train,) = [
        cell
        for cell in notebook.cells
        if "slime.train(" in cell.source and cell.cell_type == "code"
    ]
    for name in ("num_rollout", "eval_interval"):
        assert f" {name}={STEPS}," in train.source
        train.source = train.source.replace(f" {name}={STEPS},", f" {name}=2,")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct").symlink_to(smollm2)
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()  # raises the error of a cell that fails
    check_outputs(notebook.cells)
    assert (tmp_path / "outputs").is_dir()
