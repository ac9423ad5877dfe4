"""Fixtures of the rollout tests."""

import pytest
from rollout_parts import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    """A byte-level tokenizer with a chat template, as a Hugging Face folder."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
async def closed_connections():
    """Close the HTTP connections of the test's event loop."""
    yield
    from slime.engines.http import close_session

    await close_session()


@pytest.fixture
def hooks(tmp_path):
    """Write functions to a file and get the path of each."""

    def write(code):
        file = tmp_path / f"hooks_{len(list(tmp_path.iterdir()))}.py"
        file.write_text("from slime.data.sample import Sample, flatten\n" + code)
        return lambda name: f"{file}:{name}"

    return write
