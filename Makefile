# Everything needs only Python 3.11 or newer; the first target that runs makes .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PACKAGES := engine kernels recordings tui
NATIVE := kernels/cpu engine/protocol/native engine/telemetry/native
ARGS ?=
# The tests start hundreds of processes: what Python compiles is kept, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow steady lint types test-clients test-vllm test-sglang rooms schema fuzz snapshots pictures docs bench bench-tui bench-wire bench-sim chaos lab clean

demo: $(INSTALLED)
	$(BIN)/stepscope demo $(ARGS)

# Four at a time, also on two cores: half of their time they wait. In one process: ARGS="-n 0".
test: $(INSTALLED)
	$(BIN)/python -m compileall -q $(PACKAGES)
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not slow" $(ARGS)

# What needs real time: kills, floods, terminals of other processes, compilers, whole commands.
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n 5 --dist worksteal -m slow $(ARGS)

# `make test` ten times beside two busy loops: ARGS="--runs 3" for fewer.
steady: $(INSTALLED)
	$(BIN)/python tests/house/steady.py $(ARGS)

# guidellm and aiperf, each in an environment of its own, against a live server.
test-clients: $(INSTALLED)
	$(BIN)/python tests/clients/run_clients.py

# Real vLLM servers of two releases under load; VLLM_ENVIRONMENTS: where they are installed.
test-vllm: $(INSTALLED)
	$(BIN)/python -m tests.attached.run_vllm $(ARGS)

# SGLang's own scheduler under load, on a CPU; SGLANG_ENVIRONMENT: where it is installed.
test-sglang: $(INSTALLED)
	$(BIN)/python -m tests.attached.run_sglang

lint: $(INSTALLED) types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.types $(BIN)/mypy -p stepscope
	PYTHONPATH=.types $(BIN)/lint-imports --no-cache

# The folders under the name they are imported by, for the type checker.
types:
	@mkdir -p .types/stepscope
	@for package in $(PACKAGES); do ln -sfn "$(CURDIR)/$$package" ".types/stepscope/$$package"; done

# The lines in each folder's __init__.py that say what it may import, anew.
rooms: $(INSTALLED)
	$(BIN)/python tests/house/test_rooms.py

# The golden files of the wire anew, after a field was added; refuses what needs a new version.
schema: $(INSTALLED)
	PYTHONPATH=. $(BIN)/python tests/telemetry/test_schema.py

# The pictures of tests/screens/test_snapshots.py anew, after a screen was changed; look at the diff.
snapshots: $(INSTALLED)
	PYTHONPATH=. $(BIN)/python tests/screens/test_snapshots.py

# The pictures of the documents: a live engine, and screens of the two samples; look at them.
# handover.svg is the screen of the commands in docs/handover.md at 120x44, saved with S.
pictures: $(INSTALLED)
	@folder=$$(mktemp -d) && $(BIN)/stepscope demo --headless --seconds 20 --record $$folder/demo.mcap \
		&& $(BIN)/stepscope screenshot $$folder/demo.mcap -o docs/pictures/dashboard.svg; rm -r $$folder
	@for sample in freeze chunked; do $(BIN)/stepscope screenshot $$sample \
		-o docs/pictures/$$sample.svg || exit 1; done
	$(BIN)/stepscope screenshot chunked --page step --at 100 -o docs/pictures/step.svg
	$(BIN)/stepscope screenshot freeze --page request --request r0 -o docs/pictures/request.svg
	$(BIN)/stepscope screenshot freeze --page latency -o docs/pictures/latency.svg
	$(BIN)/stepscope compare freeze chunked -o docs/pictures/compare.svg
	$(BIN)/stepscope screenshot vllm --at 420 --size 120x34 -o docs/pictures/vllm.svg
	$(BIN)/stepscope screenshot speculation --at 110 --size 120x34 -o docs/pictures/speculation.svg

# The lists of keys, commands and knobs in docs/ anew, after one of them was changed.
docs: $(INSTALLED)
	$(BIN)/python tests/house/generated_docs.py

# Malformed input against running engines: make fuzz ARGS="--seconds 60 --seed 7"
fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz/fuzz_control.py $(ARGS)

# Everything that is measured, in half an hour or more.
bench: $(INSTALLED)
	@for script in tests/bench/bench_*.py; do \
		case $$script in *bench_gpu.py) short="--device cpu";; *) short=;; esac; \
		echo "== $$script $$short"; $(BIN)/python "$$script" $$short || exit 1; \
	done

# What the dashboard costs in a pseudo-terminal.
bench-tui: $(INSTALLED)
	$(BIN)/python tests/bench/bench_tui.py $(ARGS)

# What telemetry costs the engine, and what a recorder takes.
bench-wire: $(INSTALLED)
	$(BIN)/python tests/bench/bench_wire.py $(ARGS)

# How far simulated runs are from published real ones: ARGS="--validation DIR" (docs/simulate.md).
bench-sim: $(INSTALLED)
	$(BIN)/python tests/bench/bench_sim.py $(ARGS)

# Subscribers and a recorder behind a proxy that cuts, delays and stalls: ARGS="--seconds 300 --seed 7".
# Then what floods of the control socket cost, against a placebo.
chaos: $(INSTALLED)
	$(BIN)/python tests/chaos/run_chaos.py $(ARGS)
	$(BIN)/python tests/bench/bench_flood.py

# The claims of the literature, tried on this machine: recordings, pictures and report.md in lab/;
# the report and three of the pictures are those of the docs.
lab: $(INSTALLED)
	$(BIN)/stepscope lab --all -o lab $(ARGS)
	cp lab/report.md docs/lab-report.md
	for name in freeze knee modes; do cp lab/$$name.svg docs/pictures/lab-$$name.svg; done

clean:
	rm -rf $(VENV) .venv-clients .types build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Again only when what is to be installed has changed. pip keeps what fits already.
$(INSTALLED): pyproject.toml constraints.txt $(foreach folder,$(NATIVE),$(wildcard $(folder)/*.[ch]*))
	@test -x $(BIN)/pip || "$(PYTHON)" -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "no Python 3.11 or newer at '$(PYTHON)': set PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[engine,dev]"
	@touch $@
