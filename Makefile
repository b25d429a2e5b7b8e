# For everybody: `make demo` and `make test`; `make test-long` has what takes longer. All make the environment first.
PYTHON ?= python3
BIN := .venv/bin
LONG := browser or referee or chaos or parallel or slow
LAYERS := $(shell sed -n 's/^"gristmill\..*" = "\(.*\)"$$/\1/p' pyproject.toml)

# A run starts many processes, and they begin sooner where what Python compiles is kept beside the sources.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo engines test test-long test-all test-seconds test-oldest docs test-docs pictures recipes reference deprecations check dependencies audit api peers deploy-tools clean build/typecheck

demo: .venv/installed
	$(BIN)/gristmill demo

test: .venv/developing
	$(BIN)/pytest -n 2 --dist loadfile -m "not ($(LONG))"

# The tests that `make test` leaves out: all of them, or PART=2/8 with the files that changed since commit SINCE.
test-long: .venv/developing deploy-tools
	$(BIN)/pytest -n 2 --dist loadfile -m "$(LONG)" $(if $(PART),--part $(PART)) $(if $(SINCE),--changed-since $(SINCE))

test-all: test test-long

# Measure how long each file of tests takes: tests/seconds.json, by which files are dealt to workers and parts.
test-seconds: .venv/developing deploy-tools
	$(BIN)/pytest -n 2 --dist loadfile --write-seconds

# The tests of training with the oldest torch that pyproject.toml allows; all others run with that of constraints.txt, the
# newest. Its environment has that torch with what it requires, and everything else from .venv.
test-oldest: build/oldest/installed
	build/oldest/bin/python -m pytest -n 2 --dist loadfile -m "not ($(LONG))" tests/train

build/oldest/installed: pyproject.toml .venv/developing
	$(PYTHON) -m venv --clear build/oldest
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$(echo build/oldest/lib/python3*/site-packages)/gristmill.pth
	build/oldest/bin/python -m pip install --quiet --disable-pip-version-check \
		"torch==$$(sed -n 's/.*"torch>=\([0-9.]*\),.*/\1/p' pyproject.toml)"
	touch $@

# The engines that the tests of other runners want, into the user's cache folder; says what cannot be had here.
engines: .venv/installed
	$(BIN)/python .ci/engine_downloads.py

# The tests of `make test`, in which a deprecation is an error unless .ci/deprecations lets it pass: whoever upgrades
# something hears of what goes next. TESTS=tests/dataprep looks at some.
deprecations: .venv/developing
	$(BIN)/pytest -n 2 --dist loadfile -m "not ($(LONG))" -o filterwarnings="$$(grep -v '^#' .ci/deprecations)" $(TESTS)

# Licences: none is unknown or a GPL. Left out is what a person has looked up: three packages that do not say theirs
# (.ci/licences.yaml), one under the LGPL, and two that may be used under another licence than the GPL they name.
LICENCES := build/audit/bin/pip-licenses --python $(BIN)/python --with-system
LOOKED_UP := cuda-toolkit kenlm mlcroissant torchao chardet text-unidecode tld
check: .venv/developing build/typecheck build/audit/installed build/deploy/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=build/typecheck $(BIN)/mypy -p gristmill -p benchmarks
	$(BIN)/python -m pip check
	$(LICENCES) --partial-match --fail-on "UNKNOWN;GPL;General Public License" --ignore-packages $(LOOKED_UP) > /dev/null
	$(LICENCES) --format json > build/licences.json
	$(BIN)/python .ci/audit.py build/licences.json
	build/deploy/bin/checkov --directory deploy --framework kubernetes dockerfile --quiet --compact --skip-download

# The list of licences, in docs/.
dependencies: .venv/developing build/audit/installed
	$(LICENCES) --format json > build/licences.json
	$(BIN)/python .ci/audit.py build/licences.json --licences > docs/dependencies.md

# The reference of the Python interface, from the docstrings and signatures of its names.
api: .venv/installed
	$(BIN)/python .ci/api_reference.py > docs/api.md

# The rules, the index of papers, and what the benchmarks' pages say together: from the code, and from those pages.
reference: .venv/installed
	mkdir -p docs/reference
	$(BIN)/python .ci/manifest_reference.py docs/manifest
	$(BIN)/python .ci/rules_reference.py > docs/reference/rules.md
	$(BIN)/python .ci/model_families.py > docs/reference/model-families.md
	$(BIN)/python .ci/paper_index.py > docs/papers.md
	$(BIN)/python .ci/performance.py > docs/performance.md

# The documentation's site, in build/site: every link is checked, and nothing but the packages is fetched.
docs: .venv/installed build/docs/installed
	$(BIN)/python .ci/site.py build/pages
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --quiet --strict --config-file build/mkdocs.yml
	mv build/gristmill.md build/site/
	! grep -rlE --include='*.html' '<(script|link|img|iframe)[^>]*(src|href)="?https?:' build/site

# Every command of the pages that are marked to be run, in empty folders; and links, pictures, the page of commands.
test-docs: .venv/developing
	$(BIN)/pytest -n 0 tests/flows/test_start_pages.py tests/flows/test_how_to_pages.py \
		tests/flows/test_worked_examples.py tests/flows/test_pages.py

# Its pictures: boxes and arrows, and what a terminal shows of a run here and now.
pictures: .venv/installed
	$(BIN)/python .ci/pictures.py
	$(BIN)/python .ci/terminal.py

# What each recipe gives on small data, and how long that takes here: docs/recipe-runs.md. RECIPES="c4 grpo" runs some.
recipes: .venv/developing
	$(BIN)/python .ci/recipe_runs.py $(RECIPES)

build/docs/installed: .ci/docs.txt
	$(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

# What `check` cannot know without a server of advisories: whether one of today's is about what is pinned. It asks the
# index itself about every version, which mirrors do not answer; SERVICE=osv asks the database of OSV instead.
SERVICE := pypi
audit: build/audit/installed
	build/audit/bin/pip-audit --strict --no-deps --disable-pip --vulnerability-service $(SERVICE) \
		--requirement constraints.txt || { \
		echo "Where the first package is not found, no advisories are served here: try make audit SERVICE=osv" >&2; exit 1; }

# The tools of both, in an environment of their own, so that they are not among what they audit.
build/audit/installed: .ci/tools.txt
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet --disable-pip-version-check --requirement .ci/tools.txt
	touch $@

# Whole chains of others, for `gristmill bench chain`: each in an environment of its own, for their pins conflict. What
# gristmill's environment has, they take from there, torch above all.
PEERS := dolma data-juicer text-dedup
peers: $(PEERS:%=build/peers/%/installed)

build/peers/%/installed: .ci/peers/%.txt .venv/developing
	$(PYTHON) -m venv --clear $(@D)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo $(@D)/lib/python3*/site-packages)/gristmill.pth
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	touch $@

# What checks the files of deploy/: checkov, hadolint, and Kubernetes' own schemas.
deploy-tools: build/deploy/installed
build/deploy/installed: .ci/deploy-tools.txt
	$(PYTHON) -m venv build/deploy
	build/deploy/bin/python -m pip install --quiet --disable-pip-version-check --requirement .ci/deploy-tools.txt
	touch $@

# What a run needs. torch comes first and pinned, so that nothing that follows pulls another build of it.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[all]"
	touch $@

# And what developing needs: test tools, and the software that tests and benchmarks compare with.
.venv/developing: .venv/installed
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

# The type checker sees the folders of the package as an installed one has them, through links, and the benchmarks beside.
build/typecheck:
	rm -rf $@
	mkdir -p $@/gristmill
	ln -s $(LAYERS:%=../../../%) $(patsubst %,../../../%,$(wildcard gristmill/*.py)) $@/gristmill/
	ln -s ../../benchmarks $@/

clean:
	rm -rf .venv build gristmill.egg-info gristmill-store
