# For everybody: `make demo` and `make test`, and before something lands `make test-all`. All make the environment first.
PYTHON ?= python3
BIN := .venv/bin
LONG := browser or referee or chaos or parallel or slow
LAYERS := mixtures dataprep tokenize train flows

# A run starts many processes, and they begin sooner where what Python compiles is kept beside the sources.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all check audit clean

demo: .venv/installed
	$(BIN)/gristmill run mixtures/demo.yaml

test: .venv/developing
	$(BIN)/pytest -n 2 --dist loadfile -m "not ($(LONG))"

test-all: .venv/developing
	$(BIN)/pytest -n 2 --dist loadfile

check: .venv/developing build/typecheck
	$(BIN)/ruff check .
	MYPYPATH=build/typecheck $(BIN)/mypy $(LAYERS:%=-p gristmill.%) -p benchmarks
	$(BIN)/python .ci/audit.py

# What `check` cannot know without the network: today's advisories. The auditor has an environment of its own, so that
# it is not among what it audits.
audit: .venv/developing
	$(BIN)/python .ci/audit.py --files
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	grep -v '^ *#' constraints.txt > build/audit/pinned.txt
	build/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement build/audit/pinned.txt

# What a run needs. torch comes first and pinned, so that nothing that follows pulls another build of it.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

# And what developing needs: test tools, and the software that tests and benchmarks compare with.
.venv/developing: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

# The repository is the package: the type checker sees it as `gristmill` through a link, and the benchmarks beside it.
build/typecheck: build/typecheck/gristmill build/typecheck/benchmarks
build/typecheck/gristmill:
	mkdir -p $(@D)
	ln -sfn ../.. $@
build/typecheck/benchmarks:
	mkdir -p $(@D)
	ln -sfn ../../benchmarks $@

clean:
	rm -rf .venv build gristmill.egg-info gristmill-store
