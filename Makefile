# Every target sets up what it needs: a virtual environment that is rebuilt only when its inputs change.
#   make PYTHON=python3.12 test            another interpreter
#   make CONSTRAINTS=my-constraints.txt test   another torch build, or other pins
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
EXTRAS ?= transformers,tools,test
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: help venv demo test lint types soak build clean

help:
	@echo "make demo    serve three small models through the pool and compare every answer (CPU, no download of weights)"
	@echo "make test    run the test suite"
	@echo "make lint    ruff check and ruff format --check"
	@echo "make types   mypy"
	@echo "make soak    random requests against the pool for minutes, checked after each step"
	@echo "make build   sdist, and the wheel built from it, in dist/"
	@echo "make clean   remove what the other targets made"

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "Setting up $(VENV) (once; about 2.4 GB with the CPU build of torch)"
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install -q -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@touch $@

venv: $(STAMP)

demo: $(STAMP)
	$(RUN) examples/serve_glm.py
	$(RUN) examples/serve_deepseek.py
	$(RUN) examples/serve_deepseek_v4.py

test: $(STAMP)
	$(RUN) -m pytest -q -n auto --maxprocesses 8 --dist worksteal

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(STAMP)
	$(RUN) -m mypy

soak: $(STAMP)
	$(RUN) tests/soak.py

build: $(STAMP)
	rm -rf build dist
	$(RUN) -m build

clean:
	rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
