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
