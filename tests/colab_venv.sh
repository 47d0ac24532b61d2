#!/usr/bin/env bash
# Run every lesson top to bottom on Colab's notebook stack, in a venv of its own (.venv-colab).
#
# What this is not: Colab's Python. Colab has 3.13 and a CUDA torch 2.11 of several gigabytes; this
# takes the project's own Python and CPU torch, and from tests/colab-constraints.txt the versions
# of everything else. tests/test_colab.py resolves the real Python 3.13 pins without installing.
# Exit status 77: it could not be tried here, and the last line says why.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-colab
python=$venv/bin/python
torch=$(.venv/bin/python -c 'import torch; print(torch.__version__)')
case $torch in
*+cpu) ;;
*)
    echo "skipped: .venv has torch $torch; only a +cpu build is small enough to install twice"
    exit 77
    ;;
esac

pins=$venv/pins.txt
stack='ipykernel|ipython|ipywidgets|widgetsnbextension|jupyterlab_widgets|traitlets|jupyter_client|nbformat|nbclient|tornado|pyzmq|numpy|matplotlib|plotly|tqdm|psutil|safetensors'
serve='aiohttp|anyio|fastapi|httptools|httpx|Jinja2|multidict|openai|prometheus_client|pydantic|pydantic_core|starlette|tokenizers|huggingface_hub|typing_extensions|uvicorn|uvloop|yarl'
[ -x $python ] || .venv/bin/python -m venv $venv
grep -E "^($stack|$serve)==" tests/colab-constraints.txt >$pins
install="$python -m pip install --quiet --disable-pip-version-check"
$install --requirement $pins
# No index but those of CPU builds has a "+cpu" version, so this never fetches a CUDA build.
$install --constraint $pins --extra-index-url https://download.pytorch.org/whl/cpu "torch==$torch"

# Installed as Colab does it, from a built package: nothing but decodelab may be new or changed.
$python -m pip uninstall --quiet --yes decodelab
$python -m pip freeze >$venv/before.txt
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
cp -r pyproject.toml README.md LICENSE shared "$source"
$install "$source[serve]"
$python -m pip freeze --exclude decodelab >$venv/after.txt
diff $venv/before.txt $venv/after.txt || {
    echo "installing the project changed the packages above"
    exit 1
}

echo "Python $($python -c 'import platform; print(platform.python_version())') for Colab's 3.13, torch $torch for its 2.11.0+cu128"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} DECODELAB_SHAPE=${DECODELAB_SHAPE:-25M} $python tests/nb/colab_run.py
