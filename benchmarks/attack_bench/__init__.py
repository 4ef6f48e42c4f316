"""Parts of `attacks.py`: `bench` mounts and measures, `policies` are what is attacked, `tables` the report.

The attacks themselves are those of `tests/attacks`, whose folder is put on the path here.
"""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(_TESTS / folder) for folder in ("attacks", "protocol")]
