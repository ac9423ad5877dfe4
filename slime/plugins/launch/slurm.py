"""A run as a batch job of Slurm: one Ray head, a Ray worker on each other node, and the driver."""

from __future__ import annotations

from string import Template

from slime.plugins.launch.run_file import Job

STOP_SECONDS = 600
"""How long before its time limit the job is told to stop, so that it can save."""

_SCRIPT = Template(r"""#!/usr/bin/env bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=$gpus
#SBATCH --time=$minutes
#SBATCH --signal=B:TERM@$stop
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=$name-%j.log
$more
# Written by `slime launch slurm`. Ten minutes before the time limit the run saves a snapshot and ends;
# the job is queued again and goes on from there.
set -euo pipefail
$preparation

# --- a Ray cluster over all nodes, which only this job's token opens ---
mapfile -t nodes < <(scontrol show hostnames "$$SLURM_JOB_NODELIST")
on() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$$1" "$${@:2}"; }
address="$$(on "$${nodes[0]}" hostname --ip-address | awk '{print $$1}')"
export RAY_ADDRESS="$$address:$${RAY_PORT:-6379}" RAY_AUTH_MODE=token
RAY_AUTH_TOKEN="$$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
export RAY_AUTH_TOKEN
ray_flags=(--num-gpus=$gpus --disable-usage-stats --block)
on "$${nodes[0]}" ray start --head --node-ip-address="$$address" --port="$${RAY_ADDRESS##*:}" "$${ray_flags[@]}" &
for node in "$${nodes[@]:1}"; do
    on "$$node" ray start --address="$$RAY_ADDRESS" "$${ray_flags[@]}" &
done
python -m slime.plugins.launch.wait_for_nodes $nodes

# --- the run ---
stopped=""
$command &
driver=$$!
trap 'stopped=yes; kill -TERM "$$driver"' TERM
status=0
wait "$$driver" || status=$$?
# A signal ends `wait`, not the driver, which still saves.
while kill -0 "$$driver" 2>/dev/null; do
    status=0
    wait "$$driver" || status=$$?
done
if [ -n "$$stopped" ] && [ "$$status" -ne 0 ]; then
    scontrol requeue "$$SLURM_JOB_ID"
fi
exit "$$status"
""")


def sbatch_script(job: Job) -> str:
    """Return the batch script of a job."""
    return _SCRIPT.substitute(
        name=job.name,
        nodes=job.nodes,
        gpus=job.gpus_per_node,
        minutes=max(int(job.hours * 60), 1),
        stop=STOP_SECONDS,
        more="\n".join(f"#SBATCH {option}" for option in job.slurm),
        preparation=job.preparation,
        command=job.command,
    )
