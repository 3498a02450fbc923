# make demo: set up and run the built-in experiment.   make test: set up and run all checks.
# make slurm, make chromium: install what the tests of SLURM and of pages (MLflow, report) need from the distribution,
# as root; without it they are skipped.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORES ?= all

.PHONY: demo test lint slurm chromium clean

demo: $(VENV)/installed
	$(BIN)/snakemake --cores $(CORES)

test: $(VENV)/installed lint
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint

slurm:
	tests/slurm/install.sh

chromium:
	tests/tracking/install_chromium.sh

# The package is installed editable, so that the rules run the code of this checkout.
$(VENV)/installed: requirements.lock pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf $(VENV) .snakemake results/*/ results/mlflow.db
