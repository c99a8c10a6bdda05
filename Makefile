# Every command of this repository. `make help` lists them; all but `help` and `clean` set up .venv first, with the engine
# and the course; those that need more add it, once.

# The tested Python first. Name another with `make setup PYTHON=/path/to/python`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$$p"; break; }; done)
# Where to look for PyTorch besides PyPI; https://download.pytorch.org/whl/cpu has the small CPU wheels.
TORCH_INDEX ?=
# Passed on to the command: `make demo ARGS=--quick`.
ARGS ?=
# Test processes at once. One torch thread each: two pools on two cores stall each other.
JOBS ?= 2

BIN := .venv/bin
ADD := $(BIN)/python scripts/setup_env.py --extra
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TQDM_DISABLE=1 HF_HUB_OFFLINE=1
NBVAL := --nbval --nbval-current-env --nbval-cell-timeout=500 --nbval-kernel-startup-timeout=300 --nbval-sanitize-with=tests/nbval_sanitize.cfg
# Long tests are spread as workers become free: whoever has none left takes half of what another still has.
PYTEST = $(ONE_THREAD) $(BIN)/python -m pytest -n $(JOBS) --dist=worksteal tests
# Translations have the code of the lessons but for words, and a test holds their numbers to the lessons': running these is enough.
NBVAL += --ignore=notebooks/zh
# Folders whose stored notebooks are run again and compared; in exercises only where nobody works in them.
NOTEBOOKS := $(wildcard notebooks solutions $(if $(CI),exercises))

.PHONY: help lock release setup doctor demo test unit notebooks check long build lint types lab update handout kernels fuzz bench peers home site slides pictures browser scale teach serve served clean
.DEFAULT_GOAL := help

help: ## list these commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: ## create .venv with the engine and the course, fetch the model file (a second call does nothing)
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
		echo "setup: minipaged needs Python 3.11 or newer and found none on PATH: install one (Debian, Ubuntu: apt-get" \
			"install python3 python3-venv; macOS: brew install python@3.11) or name it: make setup PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi; \
	"$$python" scripts/setup_env.py $(if $(TORCH_INDEX),--torch-index "$(TORCH_INDEX)")

doctor: setup ## say what this machine has, and what will run on it
	@$(BIN)/minipaged doctor $(ARGS)

demo: setup ## serve one batch under both memory policies and compare (ARGS=--quick: under a minute)
	@$(BIN)/minipaged demo $(ARGS)

test: unit notebooks ## run the tests and re-run every notebook against its stored outputs: does it work here?

unit: setup ## run the tests only
	@$(ADD) test
	$(PYTEST) -m "not slow and not extra and not browser and not serve" $(ARGS)

notebooks: setup ## re-run the notebooks only
ifneq ($(NOTEBOOKS),)
	@$(ADD) test
	$(ONE_THREAD) PYTHONWARNINGS=ignore $(BIN)/python -m pytest $(NBVAL) -n $(JOBS) --dist=loadfile $(NOTEBOOKS)
endif

check: test long ## make test, then make long: all that is tested without a browser

long: setup ## run what `make test` leaves out: thousands of histories, other processors, every planted mistake, Ray, vLLM
	@$(ADD) test
	MINIPAGED_FUZZ=6 $(PYTEST) -m "(slow or fuzz or extra) and not browser and not serve" $(ARGS)

build: setup ## execute the sources of lessons and exercises into notebooks (ARGS=02: lesson and exercise 02)
	$(BIN)/python -m coursekit.publish.build $(ARGS)
	$(BIN)/python -m coursekit.publish.translate

lint: setup ## check style and spelling
	@$(ADD) lint
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python -m coursekit.publish.translate --drift

types: setup ## check types
	@$(ADD) lint
	$(BIN)/mypy

lab: setup ## open your copy of the course, work/, in JupyterLab at lesson 00
	@$(BIN)/python -m coursekit.working_copy
	$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)/work" --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS)

update: setup ## get the newest lessons and keep what you changed in work/
	@$(BIN)/python -m coursekit.working_copy --update
	@$(MAKE) --no-print-directory setup

handout: setup ## write the course without its solutions, for a class: out/handout/ and out/handout.zip
	@$(BIN)/python -m coursekit.publish.handout

kernels: setup ## compile the Triton kernels for real GPUs, without one, and print what they cost
	@$(BIN)/minipaged kernels $(ARGS)

fuzz: setup ## drive the randomised tests with 25 times the examples of `make check` (takes hours)
	@$(ADD) test
	MINIPAGED_FUZZ=150 $(PYTEST) --timeout 0 -m fuzz $(ARGS)

bench: setup ## time this engine beside its peers on the same requests (ARGS="--mix chat48 --repeat 3")
	@$(ADD) test
	$(BIN)/python benchmarks/throughput.py $(ARGS)

peers: setup ## install vLLM's CPU build beside us, in .peers, for `make bench` (3 GB)
	$(BIN)/python benchmarks/peers/install.py

scale: setup ## install Ray, for `minipaged batch --workers` and its test
	@$(ADD) scale

teach: setup ## install nbgrader, for a teacher whose class hands in through it
	@$(ADD) teach

serve: setup ## answer HTTP requests, with a page that shows the memory (ARGS="--port 9000")
	@$(BIN)/minipaged serve --kv-memory 64MiB --max-model-len 2048 $(ARGS)

served: setup ## test the server with real clients, and its page in Chromium (ARGS="-k api")
	@$(ADD) test serve-test browser
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(JOBS) -m serve tests/serve $(ARGS)

lock: ## write uv.lock again, after a change of constraints.txt or pyproject.toml (needs uv)
	@$(PYTHON) scripts/lock.py

release: setup ## build and check a version, changelog and all; nothing is published (VERSION=1.2.0)
	@$(BIN)/python scripts/release.py "$(VERSION)"

home: setup ## write where the repository is published into every file that says it (REPO=owner/name)
	@$(BIN)/python scripts/set_home.py "$(REPO)"

site: setup ## build lessons, exercises, guides and API reference as pages to read offline, into site/
	@$(ADD) site
	@$(BIN)/python scripts/build_site.py

slides: setup ## make slides of the lessons, to be shown in a class, in slides/ (ARGS=02: of lesson 02)
	@$(BIN)/python scripts/build_slides.py $(ARGS)

pictures: setup ## measure, and draw the pictures of docs/images
	@$(BIN)/python scripts/draw_pictures.py

browser: setup ## drive the widgets in JupyterLab, and the built site, in Chromium (ARGS="-k site")
	@$(ADD) test browser
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(JOBS) -m browser tests/browser $(ARGS)

clean: ## remove .venv and everything the commands wrote; work/, which is yours, stays
	rm -rf .venv .peers out site slides build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
