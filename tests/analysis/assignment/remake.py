"""Writes the goldens of the installed JAX again: python -m tests.analysis.assignment.remake

The files are as the compilers dump them, cut after the live ranges; `expected.json` has what they say elsewhere.
"""

import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from tests.analysis.assignment.programs import lower, program

GOLDENS = Path(__file__).parent / "goldens"


def main() -> None:
    expected_path = GOLDENS / "expected.json"
    expected = json.loads(expected_path.read_text()) if expected_path.exists() else {}
    for target in ("cpu", "gpu-h100", "tpu-v5e:1x1"):
        platform = target.partition("-")[0]
        lowered, options = lower(target, *program(platform))
        with tempfile.TemporaryDirectory() as folder:
            compiled = lowered.compile(compiler_options=options | {"xla_dump_to": folder})
            name = f"{platform}-{jax.__version__}"
            for kind in ("buffer-assignment", "live-range"):
                (path,) = Path(folder).glob(f"*jit_*after_optimizations-{kind}.txt")
                (GOLDENS / f"{name}-{kind}.txt").write_text(path.read_text().partition("  Live ranges at")[0])
        expected[name] = {"temp_size_in_bytes": compiled.memory_analysis().temp_size_in_bytes}
    expected_path.write_text(json.dumps(dict(sorted(expected.items())), indent=2) + "\n")


if __name__ == "__main__":
    main()
