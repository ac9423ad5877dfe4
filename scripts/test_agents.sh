#!/usr/bin/env bash
# Programs on the OpenAI Agents SDK, LangGraph and mini-swe-agent against the endpoint for agents.
#
#   bash scripts/test_agents.sh [pytest arguments]
#
# SLIME_AGENTS_PYTHON  an environment that has these packages; by default one is made in .venv-agents. It is not that of
#                      slime's tests: the Agents SDK needs openai 3, SGLang openai 2.
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
export SLIME_AGENTS_PYTHON PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
exec "$python" -m pytest "$@" tests/plugins/agents/test_agent_frameworks.py
