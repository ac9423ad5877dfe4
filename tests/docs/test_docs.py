"""The guides name only what exists: files, flags, hooks and import paths."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
KINDS = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md", "tests/**/*.md")
PAGES = sorted(page for kind in KINDS for page in CHECKOUT.glob(kind))
# of ray, torchrun, hf, docker, env.sh's tools, tools, the quickstart and the slime command
NOT_TRAINING = {
    "--head", "--node-ip-address", "--num-gpus", "--disable-usage-stats", "--address", "--runtime-env-json",
    "--port", "--dashboard-port", "--dashboard-agent-listen-port",
    "--logdir", "--seed", "--model", "--num-rollout", "--output-dir", "--help", "--extra",
    "--check-timeout", "--check-tool-answer", "--custom-weight-loader", "--nproc-per-node", "--input-dir",
    "--nnodes", "--node-rank", "--master-addr", "--master-port", "--local-dir", "--repo-type", "--no-deps", "--from",
    "--with", "--torch-backend",
    "--origin-hf-dir", "--gpus", "--ipc", "--shm-size", "--ulimit", "--rm", "--pid", "--block", "--parts", "--batch",
    "--all-weights", "--compact", "--keys", "--max-models", "--replay", "--state", "--teacher",  # of slime serve
    "--gemma", "--output", "--page", "--seeds",  # of benchmarks/recipes.py
    "--rooms", "--task", "--run-its-code", "--host", "--token", "--export", "--export-steps", "--export-samples",
    "--step", "--sample", "--tensors", "--through", "--tolerance", "--backend", "--engine", "--cover",
    "--kind", "--mean-prompt", "--mean-response", "--sigma", "--median-response", "--lengths-from",
    "--layouts", "--async", "--json", "--layers", "--dp", "--tp", "--pp", "--cp", "--ep", "--etp", "--vpp", "--sp",
    "--tuned", "--affected", "--only", "--without-sample", "--flip-reward", "--rank-samples", "--steps",
    "--submit", "--yes", "--requeue", "--evaluate", "--build-arg", "--accept-gemma-terms",
}  # fmt: skip
NOT_BY_HAND = {"reference", "benchmarks", "tests"}
HAND_WRITTEN = [page for page in PAGES if not NOT_BY_HAND & set(page.relative_to(CHECKOUT).parts)]


def name(page: Path) -> str:
    return str(page.relative_to(CHECKOUT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://|#", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve()
        if not file.exists():
            missing.append(target)
        elif anchor and anchor not in anchors(file):
            missing.append(f"{target} (no such heading)")
    assert not missing, f"{name(page)}: {missing}"


def test_the_index_lists_every_page() -> None:
    index = CHECKOUT / "docs/en/README.md"
    links = re.findall(r"\]\(([^)#]+)", index.read_text(encoding="utf-8"))
    listed = {(index.parent / link).resolve() for link in links}
    assert set(CHECKOUT.glob("docs/en/**/*.md")) - {index} <= listed


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=name)
def test_flags_exist(page: Path) -> None:
    from slime.config.args import FLAGS
    from slime.config.passthrough import options

    # those of the servers, and all of them
    known = set(NOT_TRAINING) | set(options()) | {"--sglang-", "--router-", "--vllm-"}
    for flag in FLAGS.values():
        known |= (
            {flag.option, flag.option.replace("--", "--no-", 1)}
            if flag.kind == "toggle"
            else {flag.option}
        )
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text(encoding="utf-8")))
    assert named <= known, f"{name(page)}: {sorted(named - known)}"


def test_every_hook_that_works_is_documented_and_nothing_else() -> None:
    from slime.config.args import FLAGS

    text = (CHECKOUT / "docs/en/get_started/customization.md").read_text(encoding="utf-8")
    table = text.split("## All hooks")[1].split("## ")[0]
    documented = set(re.findall(r"--[a-z-]+-path", table))
    hooks = {
        flag.option
        for flag in FLAGS.values()
        if flag.status == "works"
        and flag.option.endswith("-path")
        and (flag.kind == "hook" or "hook" in flag.option)
    }
    assert documented == hooks


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=name)
def test_import_paths_work(page: Path) -> None:
    # rows that a reader shall add
    text = re.sub(r'\("algorithm", [^)]*\)', "", page.read_text(encoding="utf-8"))
    for path in set(re.findall(r"\bslime\.[a-z_]+\.[\w.]*\w", text)):
        module, _, attribute = path.rpartition(".")
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), f"{name(page)}: {path}"


def test_the_http_surface_that_is_documented_is_served() -> None:
    text = (CHECKOUT / "docs/en/backends.md").read_text(encoding="utf-8")
    table = text.split("### The HTTP that engines speak")[1].split("## ")[0]
    documented = set(re.findall(r"(?<=[`\s])/[a-z_0-9/]+", table))
    server = "".join(
        file.read_text(encoding="utf-8") for file in CHECKOUT.glob("slime/plugins/embedded/*.py")
    )
    assert len(documented) > 20
    assert not {path for path in documented if f'"{path}"' not in server}


def test_the_reward_types_are_the_same_in_guide_parser_and_rollout() -> None:
    from slime.registry import parts

    text = (CHECKOUT / "docs/en/get_started/usage.md").read_text(encoding="utf-8")
    table = text.split("| `--rm-type` |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(parts("reward"))
