"""The README's commands are those that CI runs; its example runs as printed."""

import contextlib
import functools
import io
import re
import subprocess
import tomllib
from pathlib import Path

import jaxmem

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of one language, without their fences."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_ci_runs_the_two_commands():
    done = subprocess.run([ROOT / ".ci/run", "commands"], capture_output=True, text=True, check=True)
    assert done.stdout == "".join(blocks("sh"))
    assert len(done.stdout.splitlines()) == 2, "each command is one line that does all its set-up"


def test_the_commands_name_files_and_extras_that_exist():
    compare, tests = blocks("sh")
    assert (ROOT / re.search(r"jaxmem compare (\S+)", compare).group(1)).is_file()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in (compare, tests):
        assert set(re.search(r"'\.\[(.*?)\]'", command).group(1).split(",")) <= set(extras)


@functools.cache
def run_example() -> dict:
    """What the Python example leaves behind."""
    (example,) = blocks("python")
    names = {"__name__": "readme"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(example, str(ROOT / "README.md"), "exec"), names)
    return {**names, "printed": printed.getvalue()}


def test_the_example_runs():
    names = run_example()
    assert str(names["step"].report()) in names["printed"]
    assert str(names["metrics"]["loss"]) in names["printed"]
    assert int(names["state"].step) == 1


def test_the_table_is_what_print_shows_of_a_comparison():
    names = run_example()
    comparison = jaxmem.compare({"none": jaxmem.MemoryConfig()}, names["workload"], target="cpu")
    printed, _ = blocks("text")
    (asked,) = re.findall(r"--target (\S+)", blocks("sh")[0])
    assert re.findall(r"^target (\S+) -", printed, re.MULTILINE) == asked.split(",")
    today = str(comparison)
    every = headings(today)[0]
    for shown in headings(printed):  # of each target the table of a terminal of 80 columns, without what follows below
        assert shown == every[: len(shown)] and "fits" in shown
    assert printed.count("\ncheapest that fits: ") == 3 and "\ncheapest that fits: " in today


def headings(table: str) -> list[list[str]]:
    """The words of each line that begins with `variant`."""
    return [line.split() for line in table.splitlines() if line.startswith("variant")]
