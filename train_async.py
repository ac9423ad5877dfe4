"""slime's asynchronous loop: generation goes on while a step trains.

    python train_async.py --async-buffer-size 4 --update-weights-interval 2 ...   (other flags as for train.py)

``--async-buffer-size 1 --update-weights-interval 1`` is one-step off-policy. With ``--rollout-function-path
slime.rollout.fully_async_rollout.generate_rollout_fully_async`` groups continue through an update.

A thread of the driver (``rollouts``) keeps asking for rollouts; the main thread runs the loop below. What each waits
for, and what ends the wait::

    main thread                                          thread of the driver
    next()            waits for a finished rollout  <--  a rollout is generated
    train()           waits for the training ranks       waits for the engines, meanwhile
    update_weights()  waits until no rollout is          waits until the update is over
                      under way, then for the engines    (with a standing pool neither waits for the other)
    next()            the step is over: its place   -->  waits for room in the buffer, and for weights that are
                      in the buffer is free              new enough (--max-weight-staleness)
"""

from __future__ import annotations

from slime.cluster.checks import parse_and_check
from slime.cluster.run import open_run
from slime.config.args import Args


def train(args: Args) -> None:
    with open_run(args, asynchronous=True) as run:
        run.update_weights()  # waits until engines hold the trainer's weights, before any rollout starts
        if run.evaluates_at_start():
            run.evaluate(run.first_rollout)
        with run.prefetch() as rollouts:  # starts the thread; the exit waits for an evaluation that is under way
            for rollout_id in range(run.first_rollout, run.num_rollout):
                batch = rollouts.next()  # waits for the oldest finished rollout, and lets the thread start more
                run.train(rollout_id, batch)  # waits for all training ranks; the thread generates meanwhile
                if run.is_due(rollout_id, args.save_interval):
                    rollouts.save(rollout_id)  # waits until no rollout is under way (no standing pool), then saves
                if run.is_due(rollout_id, args.update_weights_interval):
                    rollouts.update_weights()  # waits for an evaluation, and as above; then lets rollouts start
                if run.is_due(rollout_id, args.eval_interval):
                    rollouts.evaluate(rollout_id + 1)  # waits for it; with a standing pool the next update does
                run.end_step(rollout_id)  # logs the step; commits a snapshot of --async-save that is complete by now


if __name__ == "__main__":
    train(parse_and_check(asynchronous=True))
