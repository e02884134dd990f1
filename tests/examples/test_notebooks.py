"""The notebooks as they are stored: valid, small, without outputs; their first cell installs what is missing, only.

`.ci/run` executes them. Outputs are not stored: they would be another version's, and a change of one cell would change
thousands of lines.
"""

import importlib.util
import json
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path, kind="code"):
    return ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


def test_both_are_there_and_ci_runs_them():
    names = [path.stem for path in NOTEBOOKS]
    assert names == ["compare_policies", "quickstart"]
    (run,) = re.findall(r"^for notebook in (.*); do$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert sorted(run.split()) == names


@each
def test_it_is_valid_small_and_without_outputs(path):
    text = path.read_text()
    stored = json.loads(text)
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5) and len(text) < 300_000
    assert set(stored["metadata"]) == {"kernelspec", "language_info"}, "no version of somebody's Python"
    ids = [cell["id"] for cell in stored["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-zA-Z0-9-_]{1,64}", one) for one in ids)
    for cell in stored["cells"]:
        assert cell["cell_type"] in ("code", "markdown") and cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            compile("".join(cell["source"]), path.name, "exec")
    assert not re.search(r"(/home|/root|/tmp|/work|/Users|/content|[A-Z]:\\)", text), "a path of somebody's machine"


@each
def test_each_cell_of_code_is_told_what_it_is_for(path):
    kinds = " ".join(cell["cell_type"] for cell in json.loads(path.read_text())["cells"])
    assert "code code" not in kinds and kinds.startswith("markdown code") and kinds.endswith("markdown")


def install(path, monkeypatch, *, folder, packages, here=False):
    """What pip is asked for by the first cell, on a machine with these packages; None if it is not called."""

    def version(name):
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.chdir(folder)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: here or None)
    with mock.patch.object(subprocess, "run") as run:
        exec(compile(cells(path)[0], path.name, "exec"), {})
    return run.call_args.args[0][5:] if run.called else None


@each
def test_the_first_cell_installs_from_the_checkout_with_the_plugin_that_is_there(path, monkeypatch, tmp_path):
    extras = "[gpu-aot,tpu-aot]" if path.stem == "compare_policies" else ""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(filter(None, extras.strip("[]").split(","))) <= set(known)
    assert install(path, monkeypatch, folder=ROOT / "examples", packages={}, here=True) is None
    for plugins, asked in (((), "jax[]"), (("jax-cuda12-plugin",), "jax[cuda12]"), (("libtpu",), "jax[tpu]")):
        packages = dict.fromkeys(("jax", *plugins), "0.7")
        wanted = [f"jaxmem{extras} @ {ROOT.as_uri()}", asked]  # pip takes no extras after the address of a repository
        assert install(path, monkeypatch, folder=ROOT / "examples", packages=packages) == wanted
    with pytest.raises(AssertionError, match="Set SOURCE"):
        install(path, monkeypatch, folder=tmp_path, packages={})
