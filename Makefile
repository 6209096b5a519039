PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test check format

# torch goes first, so that the build without CUDA is kept where the index offers one.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -c constraints.txt -e '.[cli,report,test,examples]'
	touch $@

.venv: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python examples/char_gpt.py

# Two at a time: each test of a job keeps about one core busy. Those of a file stay together: some share a run.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=15

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
