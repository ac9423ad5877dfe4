"""slime's asynchronous loop: generation runs on while training runs.

    python train_async.py --async-buffer-size 4 --update-weights-interval 2 ...   (other flags as for train.py)

``--async-buffer-size 1 --update-weights-interval 1`` is one-step off-policy. With ``--rollout-function-path
slime.rollout.fully_async_rollout.generate_rollout_fully_async`` groups go on generating through an update.
"""

from __future__ import annotations

from slime.cluster.checks import parse_and_check
from slime.cluster.prefetch import Prefetcher
from slime.cluster.run import Run
from slime.config.args import Args


def train(args: Args) -> None:
    with Run(args, asynchronous=True) as run:
        run.update_weights()
        if run.evaluates_at_start():
            run.evaluate(run.first_rollout)
        with Prefetcher(run) as rollouts:
            for rollout_id in range(run.first_rollout, run.num_rollout):
                batch = rollouts.next()
                run.train(rollout_id, batch)
                if run.is_due(rollout_id, args.save_interval):
                    rollouts.save(rollout_id)
                if run.is_due(rollout_id, args.update_weights_interval):
                    rollouts.update_weights()
                if run.is_due(rollout_id, args.eval_interval):
                    rollouts.evaluate(rollout_id + 1)
                run.end_step(rollout_id)


if __name__ == "__main__":
    train(parse_and_check(asynchronous=True))
