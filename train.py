"""slime's synchronous loop: generate, train, bring the weights to the engines, again.

    python train.py --hf-checkpoint MODEL --prompt-data DATA.jsonl --rollout-batch-size 32 --n-samples-per-prompt 8 ...

Everything that happens is on this screen; each line's room is named in docs and in CONTRIBUTING.md.
"""

from __future__ import annotations

from slime.cluster.checks import parse_and_check
from slime.cluster.run import Run
from slime.config.args import Args


def train(args: Args) -> None:
    with Run(args) as run:
        run.update_weights()
        if run.evaluates_at_start():
            run.evaluate(run.first_rollout)
        for rollout_id in range(run.first_rollout, run.num_rollout):
            batch = run.generate(rollout_id)
            run.offload_engines()
            run.train(rollout_id, batch)
            if run.is_due(rollout_id, args.save_interval):
                run.save(rollout_id)
            run.update_weights()
            if run.is_due(rollout_id, args.eval_interval):
                run.evaluate(rollout_id + 1)
            run.end_step(rollout_id)


if __name__ == "__main__":
    train(parse_and_check())
