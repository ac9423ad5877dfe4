"""A session with a tiny model, which the servers of a file share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_parts import save_model

from slime.api.session import Session
from slime.cluster import actors


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny-served-model"))


@pytest.fixture(scope="module")
def session(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    outputs = str(tmp_path_factory.mktemp("served"))
    try:
        with Session(tiny_model, lora_rank=8, lora_sync="merged", output_dir=outputs) as session:
            yield session
    finally:
        actors.use(None)  # later tests of this process use Ray
