# Every target sets itself up from nothing. Options of the demo go through DEMO_ARGS, e.g.
#   make demo DEMO_ARGS="--cheat wrong-model --minutes 3"
BIN := .venv/bin
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: setup demo demo-smollm2 test test-long bench lint wheel clean

setup:
	@scripts/setup.sh

demo: setup
	@$(BIN)/intellect-node devnet up --model tiny $(DEMO_ARGS)

demo-smollm2:
	@scripts/setup.sh --model smollm2
	@$(BIN)/intellect-node devnet up --model smollm2 $(DEMO_ARGS)

test:
	@scripts/setup.sh --contracts
	@$(MAKE) --no-print-directory lint
	$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist loadfile --ignore tests/swarm $(TEST_ARGS)
	$(TEST_ENV) $(BIN)/python -m pytest -q tests/swarm

test-long:
	@scripts/setup.sh --contracts --model smollm2
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "long or not long" $(TEST_ARGS)

bench: setup
	@for script in benchmarks/*.py; do echo "== $$script"; $(TEST_ENV) $(BIN)/python $$script || exit 1; done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: setup
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv build dist contracts/node_modules
