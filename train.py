"""slime's synchronous loop: generate, train, bring the weights to the engines, repeat.

    python train.py --hf-checkpoint MODEL --prompt-data DATA.jsonl --rollout-batch-size 32 --n-samples-per-prompt 8 ...

This process is the driver. It waits for each line below before it goes on to the next, so engines and trainer take
turns; every wait has a deadline, ends with the first process that fails, and can be interrupted by Ctrl-C::

    driver      generate          offload    train           save    update_weights           evaluate
    engines     make samples      release    (idle)          (idle)  load the new weights     make samples
    trainer     (idle)            wake up    train a step    write   send, then go to sleep   (idle)

"offload", "wake up" and "sleep" are of runs in which engines and trainer share GPUs (``--colocate``).
"""

from __future__ import annotations

from slime.cluster.checks import parse_and_check
from slime.cluster.run import open_run
from slime.config.args import Args


def train(args: Args) -> None:
    with open_run(args) as run:  # engines and training ranks have loaded their models; all processes end with the block
        run.update_weights()  # engines hold the trainer's weights, which a resumed run has from its snapshot
        if run.evaluates_at_start():
            run.evaluate(run.first_rollout)
        for rollout_id in range(run.first_rollout, run.num_rollout):
            batch = run.generate(rollout_id)  # waits for the rollout manager: samples with rewards, split over ranks
            run.offload_engines()  # colocated: waits until engines have released memory, then wakes the trainer
            run.train(rollout_id, batch)  # waits for all training ranks: first the critic's, then the actor's
            if run.is_due(rollout_id, args.save_interval):
                run.save(rollout_id)  # waits until ranks and manager have written their state (--async-save: copied it)
            run.update_weights()  # waits until every engine holds the new weights and was audited; requests may come
            if run.is_due(rollout_id, args.eval_interval):
                run.evaluate(rollout_id + 1)  # waits for all evaluation sets, generated with these weights
            run.end_step(rollout_id)  # logs the step; commits a snapshot of --async-save that is complete by now


if __name__ == "__main__":
    train(parse_and_check())
