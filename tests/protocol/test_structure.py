"""Rules about the code itself: which way imports run, and what peers' bytes never meet."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "intellect_protocol": ROOT / "protocol" / "intellect_protocol",
    "intellect_node": ROOT / "node" / "intellect_node",
    "intellect_coordinator": ROOT / "coordinator" / "intellect_coordinator",
    "intellect_trainer": ROOT / "trainer" / "intellect_trainer",
}
# Parts of `protocol` that are pure: no network, no environment variables.
PURE = ("run", "keys", "wire", "messages", "assignment", "sampling", "toploc", "rollouts", "checkpoint")


def sources(package: str) -> Iterator[Path]:
    return PACKAGES[package].rglob("*.py")


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    allowed = {package, "intellect_protocol"}
    for path in sources(package):
        for module in imported_modules(path):
            top = module.split(".")[0]
            assert top not in PACKAGES or top in allowed, f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_touch_neither_network_nor_environment(name: str) -> None:
    path = PACKAGES["intellect_protocol"] / f"{name}.py"
    modules = {module.split(".")[0] for module in imported_modules(path)}
    assert not modules & {"socket", "http", "urllib", "urllib3", "aiohttp", "libp2p", "trio", "web3"}
    assert "os.environ" not in path.read_text()


def test_no_pickle_ever_meets_bytes_from_outside() -> None:
    for package in PACKAGES:
        for path in sources(package):
            modules = {module.split(".")[0] for module in imported_modules(path)}
            assert not modules & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}, path
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                    options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    assert options.get("weights_only") == "True", f"{path}:{node.lineno}"


@pytest.mark.parametrize("package", ["intellect_node", "intellect_coordinator", "intellect_trainer"])
def test_help_loads_nothing_heavy(package: str) -> None:
    code = (
        "import sys\n"
        f"import {package}.cli as cli\n"
        "sys.argv = ['program', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'web3', 'libp2p', 'pyarrow', 'aiohttp', 'sqlalchemy'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
