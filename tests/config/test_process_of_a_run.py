"""What programs get of the environment of a run."""

from __future__ import annotations

import pytest

from slime.config.process import reduced_environment

NEEDED = {
    "PATH": "/bin", "HOME": "/home/me", "LANG": "C.UTF-8", "LC_ALL": "C", "TMPDIR": "/tmp", "PYTHONPATH": "/here",
    "CUDA_VISIBLE_DEVICES": "0", "https_proxy": "http://proxy:80", "HF_HOME": "/models", "OMP_NUM_THREADS": "1",
}  # fmt: skip
SECRETS = (
    "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "OPENAI_API_KEY", "RAY_AUTH_TOKEN",
    "SLIME_SERVER_API_KEY", "SLIME_SERVER_ADMIN_KEY", "GITHUB_TOKEN", "SSH_AUTH_SOCK", "PYTHON_KEYRING_PASSWORD",
    "MY_OWN_VARIABLE",
)  # fmt: skip


def test_a_program_gets_what_it_needs_to_run_and_no_secret() -> None:
    assert reduced_environment({**NEEDED, **dict.fromkeys(SECRETS, "x")}) == NEEDED


@pytest.mark.parametrize("name", SECRETS)
def test_variables_that_the_user_names_are_passed(name: str) -> None:
    assert reduced_environment({name: "x", "HF_TOKEN_2": "y"}, [name, "ABSENT"]) == {name: "x"}


def test_a_proxy_with_a_password_is_not_passed() -> None:
    assert reduced_environment({"HTTP_PROXY": "http://me:secret@proxy:80", "no_proxy": "*"}) == {
        "no_proxy": "*"
    }
