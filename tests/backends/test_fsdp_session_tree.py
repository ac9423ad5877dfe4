"""The branches of agents' sessions are trained as one tree: loss and gradients of their copies,
with fewer tokens.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fsdp_helpers import VOCAB, make_args, make_backend, save_tiny_llama

from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.train_loop import train_on_rollout
from slime.config.args import Args
from slime.data import fields
from slime.data.convert import samples_to_train_data, split_train_data
from slime.data.fields import RankBatch
from slime.data.sample import Sample
from slime.data.schedule import PackingSettings
from slime.models import scorer
from slime.models import token_log_probs as token_log_probs_module
from slime.plugins.agents.trajectory import Tree, Turn
from slime.rollout.state import GenerateState


class NoText:
    eos_token_id = None

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""


def session(args: Args, index: int, draw: random.Random) -> list[Sample]:
    """A question, a long first answer, and three ways to go on from there, one of which branches
    again.
    """
    tree = Tree()

    def turn(parent: Turn | None, added: list[int], answer: int) -> Turn:
        scored = [[-draw.random(), draw.randrange(VOCAB), None] for _ in range(answer)]
        meta = {
            "output_token_logprobs": scored,
            "finish_reason": {"type": "stop"},
            "weight_version": "1",
        }
        said = {"role": "assistant", "content": str(len(tree.turns))}
        made = Turn(
            parent, [], [], said, added, [{"text": "", "meta_info": meta}], id=str(len(tree.turns))
        )  # type: ignore[typeddict-item]
        tree.add(made)
        return made

    first = turn(None, [1, 2, 3, 4], 40)
    turn(first, [5, 6], 7)
    second = turn(first, [7], 35)
    for added in ([8], [9], [5]):
        turn(second, added, 4)
    base = Sample(group_index=0, index=index, rollout_id=index, reward=float(index), prompt="q")
    state = GenerateState(args)
    state.tokenizer = NoText()
    return tree.samples(state, base)


def batch_of(args: Args) -> RankBatch:
    draw = random.Random(0)
    sessions = [session(args, index, draw) for index in range(2)]
    data = samples_to_train_data(args, [sessions])  # type: ignore[list-item]
    (part,) = split_train_data(PackingSettings.from_args(args), data, 1)
    return fields.to_rank_batch(part)


def arguments(checkpoint: Path, **flags: Any) -> Args:
    args = make_args(
        checkpoint, rollout_batch_size=1, n_samples_per_prompt=2, global_batch_size=2, clip_grad=0.0,
        use_dynamic_batch_size=True, balance_data=True, entropy_coef=0.01, **flags,
    )  # fmt: skip
    args.num_steps_per_rollout = 1
    return args


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=256)


def test_a_tree_gives_the_loss_and_gradients_of_its_copies(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, scored = {}, []

    def token_log_probs(hidden: Any, *arguments: Any, **options: Any) -> Any:
        scored.append(len(hidden))
        return token_log_probs_module.token_log_probs(hidden, *arguments, **options)

    monkeypatch.setattr(scorer, "token_log_probs", token_log_probs)
    for share in (True, False):
        args = arguments(
            llama, share_prompt_in_pack=share, max_tokens_per_gpu=200 if share else 1000
        )
        backend: FsdpBackend = make_backend(args)
        rows: list[int] = []
        count = lambda _, given, rows=rows: rows.append(given[0].kwargs["input_ids"].numel())  # noqa: E731
        scored.clear()
        hook = backend.scorer.register_forward_pre_hook(count)
        metrics, _ = train_on_rollout(backend, batch_of(args))
        hook.remove()
        grads = {name: p.grad.clone() for name, p in backend.named_parameters if p.grad is not None}
        found[share] = metrics, grads, rows, sum(scored)
    (metrics, grads, rows, logits), (copied, want, all_rows, all_logits) = found[True], found[False]
    # Of a session: the question and the first answer (4 + 40), the branch that ends there (2 + 7),
    # the second answer (1 + 35), and three ends (1 + 4). As copies, a branch has all that comes
    # before it.
    assert rows == [44 + 9 + 36 + 15] * 2, "a micro-batch per session"
    assert sum(all_rows) == 2 * (44 + 9 + 3 * (44 + 36 + 5))
    assert logits == 2 * (40 + 9 + 36 + 15) and all_logits == sum(all_rows) - 2 * 4 * 4, (
        "so does the output layer"
    )
    for name in ("train/loss", "train/pg_loss", "train/grad_norm", "train/entropy_loss"):
        assert metrics[name] == pytest.approx(copied[name], rel=1e-5, abs=1e-7), name
    assert metrics["train/grad_norm"] > 0.01 and grads.keys() == want.keys()
    for name in want:
        error = float((grads[name] - want[name]).norm())
        assert error <= 1e-5 * float(want[name].norm()) + 1e-9, name


def test_branches_stay_together_when_samples_are_distributed(llama: Path) -> None:
    """The cap has room for one session as a tree, and not for two. As copies, a session needs two
    micro-batches.
    """
    args = arguments(llama, max_tokens_per_gpu=200)
    batch = batch_of(args)
    sessions = [
        {batch["sample_indices"][i] for i in micro} for micro in batch["micro_batch_indices"]
    ]
    assert sessions in ([{0}, {1}], [{1}, {0}])
    copies = batch_of(arguments(llama, max_tokens_per_gpu=200, share_prompt_in_pack=False))
    assert copies["num_microbatches"] == [4]
