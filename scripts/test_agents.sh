#!/usr/bin/env bash
# Programs on the OpenAI Agents SDK, LangGraph and mini-swe-agent against the endpoint for agents, and the environments of
# the packages harbor and nemo-gym.
#
#   bash scripts/test_agents.sh [pytest arguments]
#
# SLIME_AGENTS_PYTHON  an environment that has these packages; by default one is made in .venv-agents. It is not that of
#                      slime's tests: the Agents SDK needs openai 3, SGLang openai 2.
# HARBOR_PROGRAM       the command of harbor, and NEMO_GYM_PYTHON a Python with nemo-gym; by default both are made in
#                      .venv-harbor and .venv-nemo-gym if there is a python3.12, and left out otherwise.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
python="$(bash scripts/env.sh | tail -n 1)"
if [ -z "${SLIME_AGENTS_PYTHON:-}" ]; then
    SLIME_AGENTS_PYTHON="$PWD/.venv-agents/bin/python"
    [ -x "$SLIME_AGENTS_PYTHON" ] || "$python" -m venv .venv-agents
    "$SLIME_AGENTS_PYTHON" -m pip install --quiet \
        openai-agents==0.24.0 langgraph==1.2.24 langchain-openai==1.7.4 mini-swe-agent==2.4.6
fi
if [ -z "${HARBOR_PROGRAM:-}${NEMO_GYM_PYTHON:-}" ] && python3.12 -c "" 2>/dev/null; then  # pyenv has names of versions that are not in use
    for package in harbor==0.26.0 nemo-gym==0.4.0; do
        folder=".venv-${package%%=*}"  # one each, because they need other versions of the same packages
        [ -x "$folder/bin/python" ] || python3.12 -m venv "$folder"
        "$folder/bin/python" -m pip install --quiet "$package"
    done
    export HARBOR_PROGRAM="$PWD/.venv-harbor/bin/harbor" NEMO_GYM_PYTHON="$PWD/.venv-nemo-gym/bin/python"
fi
export SLIME_AGENTS_PYTHON PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
exec "$python" -m pytest "$@" tests/plugins/agents/test_agent_frameworks.py \
    tests/plugins/agents/environments/test_harbor_package.py tests/plugins/agents/environments/test_nemo_gym.py
