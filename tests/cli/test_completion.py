"""What Tab offers in a shell, asked as the shells' own scripts ask."""

import os
import subprocess
import sys

import pytest

from jaxmem.cli import _completion
from jaxmem.config import FLOAT_DTYPES
from jaxmem.targets import KNOWN_TARGETS
from tests.cli.helpers import LINEAR, run, write

pytestmark = pytest.mark.once


@pytest.fixture
def bash(capfd, monkeypatch):
    """What bash is offered for a line, which it splits at spaces and colons."""

    def offered(line):
        words = line.replace(":", " : ").split(" ")
        words = [word for place, word in enumerate(words) if word or place == len(words) - 1]
        monkeypatch.setenv("_JAXMEM_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        ran = run(capfd)
        assert ran.code == 0 and ran.err == ""
        return ran.out.split()

    return offered


def test_names_of_targets_and_dtypes_are_those_of_the_tables():
    assert tuple(_completion.targets()) == KNOWN_TARGETS
    assert _completion.DTYPES == FLOAT_DTYPES


def test_bash(bash, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path, LINEAR + "\n    def wide():\n        return jaxmem.Workload\n\n    def helper():\n        return 1\n"
    )
    assert bash("jaxmem expl") == ["explain-oom"]
    assert bash("jaxmem analyze model.py --target tpu-v5") == ["tpu-v5e", "tpu-v5p"]
    assert bash("jaxmem compare model.py --target cpu,gpu-h1") == ["cpu,gpu-h100"]
    assert bash("jaxmem compare model.py --remat none,dots_") == ["none,dots_no_batch"]
    assert bash("jaxmem residuals model.py --precision b") == ["bfloat16"]
    assert bash("jaxmem compare model.py --order tied,f") == ["tied,free"]
    assert bash("jaxmem train model.py --roll un") == ["unrolled"]
    # Only what stands behind the colon is replaced; a function that makes no Workload is none.
    assert bash("jaxmem analyze model.py:w") == ["workload", "wide"]
    assert bash("jaxmem analyze model.py:") == ["workload", "wide"]
    assert bash("jaxmem compare model.py --remat none,auto:6") == ["6GiB"]
    assert bash("jaxmem analyze mod") == []  # files are the shell's own business


def test_it_is_quick_since_jax_stays_out():
    program = """
import os, sys
os.environ.update(_JAXMEM_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="jaxmem compare x.py --target gpu-h")
from jaxmem.cli import main
code = main([])
print(code, "jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ)
    assert "gpu-h100" in done.stdout and "gpu-h200" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 False"
