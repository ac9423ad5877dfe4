#!/usr/bin/env bash
# Tests with torchvision, without which transformers does not make the processors of Qwen's image-text models.
#
#   bash scripts/test_torchvision.sh [pytest arguments]
#   SLIME_EXTRA=sglang-cpu bash scripts/test_torchvision.sh -m sglang [pytest arguments]   # with real SGLang
#
# torchvision is installed into a folder beside the environment of scripts/env.sh and not into it: PyPI's wheels are
# CUDA builds, which fail to import beside a CPU build of torch. tests/torchvision_operators mends that for these tests.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
python="${SLIME_PYTHON:-$(bash scripts/env.sh | tail -n 1)}"
folder="${TORCHVISION_FOLDER:-$(dirname "$(dirname "$python")")-torchvision-0.28.0}" # the release for torch 2.13
if [ ! -e "$folder" ]; then
    made="$(mktemp -d "$folder.XXXXXX")"
    cat >"$made/pin" <<'EOF_PIN'
torchvision==0.28.0 \
    --hash=sha256:5a38bc6da3d72621be003400b66f66a2b4c6d644fde05f680c2cb7ca8cf8dd6c \
    --hash=sha256:7e80f543b22503d9415e126db5f0ff3917036925e38560ee6b9ae38c571a4002 \
    --hash=sha256:5cf78ebc401ce64ae19b8c55de866bb836797d559a4de9c25ccbe74cfa642d3a \
    --hash=sha256:028a3d481b37d785605620d7cdad897064c5a55bae2aa1f2658766333e291940 \
    --hash=sha256:bb6dd6918460ed89cc7644adcc2402991474d6933cf1ce92b390641cb233fddf \
    --hash=sha256:ad7b3a439265cc3739a4ab5b4c998c0e38ea99c0ee7ca4dea35c5d0b099ec237
EOF_PIN
    "$python" -m pip install --quiet --no-deps --require-hashes --target "$made" -r "$made/pin"
    mv -T "$made" "$folder" || rm -r "$made" # another call was quicker
fi
export PYTHONPATH="$PWD:$PWD/tests/torchvision_operators:$folder${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY=PASSIVE
exec "$python" -m pytest -m "not slow and not sglang and not vllm and not cuda" "$@"
