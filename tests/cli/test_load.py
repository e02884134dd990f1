"""FILE[:FUNCTION]: what is found, what is called, and what is said when it cannot be."""

import sys

import pytest

from jaxmem.cli._errors import DEBUG_HINT
from jaxmem.cli._load import load_workload, split_spec
from jaxmem.errors import FileLoadError, WorkloadError
from jaxmem.workload import Workload
from tests.cli.helpers import LINEAR, write


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch):
    """The loader makes the file's directory importable and registers the module: undone after each test."""
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if "pytest-of-" in file or name.startswith("jaxmem_file_"):
            del sys.modules[name]


def message(spec, **keywords):
    with pytest.raises(FileLoadError) as caught:
        load_workload(spec, **keywords)
    return str(caught.value)


def test_the_default_function_and_a_named_one(tmp_path):
    path = write(tmp_path, LINEAR + "\n    def wide():\n        return workload(width=16)\n")
    assert load_workload(path).batch.shape == (8, 4)
    assert load_workload(f"{path}:wide").batch.shape == (8, 16)


def test_a_workload_at_module_level_needs_no_function(tmp_path):
    path = write(tmp_path, LINEAR + "\n    small = workload(rows=2)\n")
    assert load_workload(f"{path}:small").batch.shape == (2, 4)


def test_neighbours_are_importable_and_see_the_same_module(tmp_path):
    write(
        tmp_path, "import jaxmem_test_main\n\ndef rows():\n    return jaxmem_test_main.ROWS\n", "jaxmem_test_helper.py"
    )
    source = "\n    ROWS = 6\n    def built():\n        import jaxmem_test_helper\n"
    source += "        return workload(rows=jaxmem_test_helper.rows())\n"
    path = write(tmp_path, LINEAR + source, "jaxmem_test_main.py")
    assert load_workload(f"{path}:built").batch.shape == (6, 4)


def test_a_file_whose_name_is_taken_does_not_replace_the_module(tmp_path):
    path = write(tmp_path, LINEAR, "json.py")
    import json

    assert isinstance(load_workload(path), Workload)
    assert sys.modules["json"] is json


def test_settings_reach_the_function_as_literals_or_text(tmp_path):
    path = write(tmp_path, LINEAR)
    assert load_workload(path, settings=["rows=2", "width=3", "name=7"]).batch.shape == (2, 3)


def test_a_declared_target_is_passed_and_otherwise_not(tmp_path):
    source = (
        LINEAR
        + """
    def built(target=None, mesh=None):
        return workload(rows=2 if target is None else target.device_count, width=1 if mesh is None else mesh.size)

    def needing(mesh):
        return workload(rows=mesh.size)
"""
    )
    path = write(tmp_path, source)
    assert load_workload(f"{path}:built", target="cpu").batch.shape == (1, 1)
    assert load_workload(f"{path}:built", target="tpu-v5e:2x4").batch.shape == (8, 8)
    assert load_workload(f"{path}:built").batch.shape == (2, 1)
    assert load_workload(f"{path}:needing").batch.shape == (1, 4)
    assert load_workload(path, target="cpu").batch.shape == (8, 4)


@pytest.mark.parametrize(
    "setting, words",
    [
        (
            "row=2",
            [
                "an option that workload() in",
                "rows=8, width=4, depth=2, scale=0.5, name='linear'",
                "Did you mean rows?",
            ],
        ),
        ("zzz=2", ["--set zzz", "Use one of those"]),
        ("rows", ["NAME=VALUE", "--set rows"]),
        ("rows=many", ["rows to be a int, like its default 8", "the text 'many'"]),
        ("target=cpu", ["Use --target instead"]),
    ],
)
def test_a_setting_that_does_not_fit(tmp_path, setting, words):
    text = message(write(tmp_path, LINEAR), settings=[setting])
    for word in words:
        assert word in text


def test_a_setting_twice_and_one_left_out(tmp_path):
    path = write(tmp_path, LINEAR + "\n    def built(rows):\n        return workload(rows=rows)\n")
    assert "rows=… more than once" in message(path, settings=["rows=1", "rows=2"])
    assert "none for rows. Add --set rows=…." in message(f"{path}:built")


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    write(tmp_path, LINEAR, "model.py")
    assert f"Did you mean {tmp_path / 'model.py'}?" in message(str(tmp_path / "modle.py"))
    assert "got no such file. Check the path." in message(str(tmp_path / "other" / "zzz.py"))
    assert "got a directory" in message(str(tmp_path))
    (tmp_path / "models.py").mkdir()
    assert f"Did you mean {tmp_path / 'model.py'}?" in message(str(tmp_path / "models.py"))  # not models.py itself
    assert "Wanted FILE or FILE:FUNCTION" in message("")


def test_a_missing_function_lists_those_that_make_a_workload(tmp_path):
    source = LINEAR + "\n    def helper(): pass\n    def annotated() -> 'jaxmem.Workload': ...\n"
    path = write(tmp_path, source)
    text = message(f"{path}:work_load")
    assert "functions that make a Workload: workload, annotated" in text
    assert f"Did you mean {path}:workload?" in text
    assert "helper" not in text
    assert "it defines no function" in message(write(tmp_path, "x = 1", "empty.py"))
    assert "got a int" in message(f"{write(tmp_path, 'x = 1', 'number.py')}:x")


def test_a_colon_without_a_name(tmp_path):
    with pytest.raises(FileLoadError, match="FILE:FUNCTION"):
        split_spec("model.py:not a name")


@pytest.mark.parametrize("value, got", [("None", "None"), ("3", "a builtins.int"), ("(1, 2)", "a builtins.tuple")])
def test_a_function_that_returns_something_else(tmp_path, value, got):
    path = write(tmp_path, f"def workload():\n    return {value}\n")
    assert f"to return a jaxmem.Workload; got {got}. End the function" in message(path)


@pytest.mark.parametrize(
    "source, what",
    [
        ("\n1 / 0\n", "ZeroDivisionError: division by zero at line 2 of model.py (`1 / 0`)"),
        ("x = (\n", "SyntaxError: '(' was never closed at line 1 of model.py (`x = (`)"),
        (
            "import no_such_package_9\n",
            "Install the package that provides no_such_package_9, or put it next to model.py",
        ),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 at line 2 of model.py"),
        ("def workload():\n    raise KeyError('width')\n", "KeyError: 'width' at line 2 of model.py"),
        ("def workload():\n    open('/no/such')\n", "line 2 of model.py (`open('/no/such')`)"),
    ],
)
def test_a_file_that_raises_says_what_and_where(tmp_path, source, what):
    path = write(tmp_path, source)
    text = message(path)
    assert what in text and text.endswith(DEBUG_HINT)


def test_a_file_that_does_not_import_leaves_no_module(tmp_path):
    message(write(tmp_path, "1 / 0", "jaxmem_test_broken.py"))
    assert "jaxmem_test_broken" not in sys.modules


def test_what_jaxmem_raises_in_the_file_passes_unchanged(tmp_path):
    path = write(tmp_path, "import jaxmem\n\ndef workload():\n    return jaxmem.Workload(None, {}, {}, None)\n")
    with pytest.raises(WorkloadError, match="wanted|Wanted loss_fn to be a function"):
        load_workload(path)
