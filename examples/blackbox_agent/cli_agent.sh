#!/usr/bin/env bash
# mini-swe-agent, an agent for the command line, in an empty folder; the reward is what it leaves there.
#
#   python3 -m venv agents-env && agents-env/bin/pip install mini-swe-agent
#   slime train ... --agent-command "bash cli_agent.sh agents-env/bin"
#
# The agent runs commands that the model writes, on this machine: use its Docker environment for more than an example.
set -euo pipefail

PATH="$(cd "$1" && pwd):$PATH"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
row='import json, os; row = json.loads(os.environ["SLIME_TASK"]); '
question="$(python -c "$row print(row['prompt'][-1]['content'])")"
answer="$(python -c "$row print(row['label'])")"

export MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 MSWEA_GLOBAL_CONFIG_DIR="$folder" MSWEA_COST_TRACKING=ignore_errors
# It reads OPENAI_BASE_URL and OPENAI_API_KEY. Whatever it prints is a message of the log; the reward is the last line.
mini --model "openai/$SLIME_MODEL" --task "$question Write the number into answer.txt." \
    --yolo --exit-immediately --output "$folder/trajectory.json" </dev/null >&2
if [ "$(cat answer.txt 2>/dev/null)" = "$answer" ]; then echo '{"reward": 1}'; else echo '{"reward": 0}'; fi
