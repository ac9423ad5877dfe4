"""slime's synchronous loop: generate, train, bring the weights to the engines, repeat.

    python train.py --hf-checkpoint MODEL --prompt-data DATA.jsonl --rollout-batch-size 32 --n-samples-per-prompt 8 ...

This process is the driver. It finishes each step of the loop below before it starts the next one,
so engines and trainer take turns. Every wait has a deadline and ends as soon as one of the
processes fails. Ctrl-C interrupts it as well, except that training on a rollout and saving are
completed first::

    driver      generate          offload    train           save    update_weights           evaluate
    engines     make samples      release    (idle)          (idle)  load the new weights     make samples
    trainer     (idle)            wake up    train a step    write   send, then go to sleep   (idle)

"offload", "wake up" and "sleep" only happen in runs in which engines and trainer share GPUs
(``--colocate``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.cluster.checks import parse_and_check
from slime.cluster.run import run_loop
from slime.config.args import Args

if TYPE_CHECKING:
    from slime.cluster.phases import Run


def train(args: Args) -> None:
    # Before the loop, engines and training ranks load their models. After it, all processes of the
    # run have ended. If a training rank is lost, the loop is called again, with a run that begins
    # after the last snapshot.
    run_loop(args, loop)


def loop(args: Args, run: Run) -> None:
    # The engines have loaded the checkpoint. In a resumed run, the trainer holds the newer weights
    # of the snapshot.
    run.update_weights()
    if run.evaluates_at_start():
        run.evaluate(run.first_rollout)
    for rollout_id in range(run.first_rollout, run.num_rollout):
        step(args, run, rollout_id)


def step(args: Args, run: Run, rollout_id: int) -> None:
    """One iteration, which ``slime.Trainer`` calls as well."""
    # waits for the rollout manager: samples with rewards, split over ranks
    batch = run.generate(rollout_id)
    # In a colocated run, the engines release their memory before the trainer takes it.
    run.offload_engines()
    # waits for all training ranks: first the critic's, then the actor's
    run.train(rollout_id, batch)
    if run.is_due(rollout_id, args.save_interval):
        # Before the update: in a colocated run, the update puts the trainer to sleep. Waits until
        # ranks and rollout manager have written their state (with --async-save: until they have
        # copied it).
        run.save(rollout_id)
    # waits until every engine holds the new weights and has passed the audit
    run.update_weights()
    if run.is_due(rollout_id, args.eval_interval):
        # waits for all evaluation sets, generated with the new weights
        run.evaluate(rollout_id + 1)
    # logs the step; commits a snapshot of --async-save once it is fully written
    run.end_step(rollout_id)


if __name__ == "__main__":
    train(parse_and_check())
