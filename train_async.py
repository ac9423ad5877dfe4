"""slime's asynchronous loop: engines generate the next rollouts while the trainer runs a step.

    python train_async.py --async-buffer-size 4 --update-weights-interval 2 ...   (other flags as for train.py)

``--async-buffer-size 1 --update-weights-interval 1`` is one-step off-policy. With
``--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async``, groups
that are being generated continue through a weight update.

A second thread of the driver (``rollouts``) requests one rollout after the other, while the main
thread runs the loop below. This is what each thread waits for, and what ends the wait::

    main thread                                          thread of the driver
    next()            waits for a finished rollout  <--  a rollout is generated
    train()           waits for the training ranks       waits for the engines, meanwhile
    update_weights()  waits until no rollout is          waits until the update is complete
                      in progress, then for the engines  (with a standing pool, neither waits for the other)
    next()            the step is complete: its     -->  waits for room in the buffer, and for weights that are
                      place in the buffer is free        new enough (--max-weight-staleness)

The standing pool is what the fully asynchronous rollout function keeps: a set of groups in
generation that outlives single rollouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.cluster.checks import parse_and_check
from slime.cluster.run import run_loop
from slime.config.args import Args

if TYPE_CHECKING:
    from slime.cluster.phases import Run


def train(args: Args) -> None:
    # As in train.py, the loop is called again if a training rank is lost.
    run_loop(args, loop, asynchronous=True)


def loop(args: Args, run: Run) -> None:
    run.update_weights()  # before any rollout starts, the engines get the trainer's weights
    if run.evaluates_at_start():
        run.evaluate(run.first_rollout)
    # starts the thread; the exit waits for an evaluation in progress
    with run.prefetch() as rollouts:
        for rollout_id in range(run.first_rollout, run.num_rollout):
            # waits for the oldest finished rollout, and lets the thread start more
            batch = rollouts.next()
            # waits for all training ranks; generation continues meanwhile
            run.train(rollout_id, batch)
            if run.is_due(rollout_id, args.save_interval):
                # Without a standing pool, waits until no rollout is in progress. No rollout starts
                # between the snapshot and the update, so a run resumed from the snapshot generates
                # what this one does. The exception is a snapshot between two updates: the engines
                # of a resumed run get its weights, and those of this run keep older ones. With
                # --keep-old-actor, a resumed run sends the older ones as well.
                rollouts.save(rollout_id)
            if run.is_due(rollout_id, args.update_weights_interval):
                # Waits for an evaluation in progress, since an evaluation measures one version of
                # the weights. Without a standing pool, also waits until no rollout is in progress.
                rollouts.update_weights()
            if run.is_due(rollout_id, args.eval_interval):
                # With a standing pool, only starts the evaluation: the next update waits for its
                # result.
                rollouts.evaluate(rollout_id + 1)
            # logs the step; commits a snapshot of --async-save once it is fully written
            run.end_step(rollout_id)


if __name__ == "__main__":
    train(parse_and_check(asynchronous=True))
