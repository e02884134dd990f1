"""The command line on terminals of several widths, in pipes, and what its help says."""

import os
import pty
import re
import shlex
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import typer.main

from jaxmem.cli._app import EXAMPLES, app
from jaxmem.targets import CHIPS
from tests.cli.helpers import LINEAR, assert_refused, run, write

ROOT = Path(__file__).parent.parent.parent
CLI = [sys.executable, "-m", "jaxmem"]


def on_terminal(columns: int, *arguments: str) -> tuple[str, str]:
    """stdout and stderr of a command, each a terminal of its own."""
    ends, texts = [pty.openpty() for _ in range(2)], [b"", b""]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("COLUMNS", None)
    for _, end in ends:
        subprocess.run(["stty", "cols", str(columns)], stdin=end, check=True)
    process = subprocess.Popen([*CLI, *arguments], stdout=ends[0][1], stderr=ends[1][1], env=environment)

    def read(place: int) -> None:
        while True:
            try:
                if not (more := os.read(ends[place][0], 65536)):
                    return
            except OSError:  # the other end is closed
                return
            texts[place] += more

    readers = [threading.Thread(target=read, args=(place,)) for place in range(2)]
    for reader in readers:
        reader.start()
    assert process.wait(timeout=120) == 0, texts[1]
    for _, end in ends:
        os.close(end)
    for reader in readers:
        reader.join()
    for end, _ in ends:
        os.close(end)
    out, err = (text.decode().replace("\r\n", "\n") for text in texts)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out), err


def test_sixty_columns_and_progress_with_n_of_m(tmp_path):
    path = write(tmp_path, LINEAR)
    out, err = on_terminal(60, "compare", path, "--target", "cpu", "--remat", "none,full")
    assert max(map(len, out.splitlines())) <= 60 and "…" not in out
    assert out.count("variant ") > 1  # the columns that do not fit follow below
    assert re.search(r"[12] of 2, (tracing|compiling) (none|full) for cpu, \d s", err)
    assert err.endswith("\r\x1b[1A\x1b[2K")  # and the line is gone


def test_in_a_pipe_no_line_is_broken(capfd, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    ran = run(capfd, "compare", write(tmp_path, LINEAR), "--target", "cpu", "--remat", "none,full")
    (head,) = [line for line in ran.out.splitlines() if line.startswith("variant")]
    assert head.split()[-2:] == ["outputs", "aliased"]
    assert all(line == line.rstrip() for line in ran.out.splitlines())
    assert "_MEMORY_OPTIMIZED: bytes differ from a plain CPU run and from a TPU or GPU." in ran.out


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_names_of_chips_are_whole(capfd, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run(capfd, "targets").out
    assert all(re.search(rf"^{chip.name} ", out, re.MULTILINE) for chip in CHIPS)
    assert max(map(len, out.splitlines())) <= columns


@pytest.mark.parametrize("arguments", [("targets", "--json", "-"), ("--help",)])
def test_a_reader_that_has_seen_enough_is_no_failure(arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([*CLI, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == b""


def test_every_example_of_the_help_is_understood(monkeypatch):
    """Their files exist or are made by the one before; the command line takes their options."""
    monkeypatch.chdir(ROOT)
    group, made = typer.main.get_command(app), {"-"}
    for example in (each for examples in EXAMPLES.values() for each in examples):
        name, *arguments = shlex.split(example.rpartition("| ")[2])[1:]
        parsed = group.commands[name].make_context(name, arguments).params  # pyright: ignore[reportAttributeAccessIssue]
        for field in {"file", "before", "after", "log"} & set(parsed):
            path = parsed[field].partition(":")[0]
            assert path in made or (ROOT / path).is_file(), example
        made |= {parsed[field] for field in ("json_out", "html_out") if parsed.get(field)}


def test_help_shows_the_examples(capfd):
    ran = run(capfd, "compare", "--help")
    assert ran.code == 0 and "jaxmem compare examples/gpt.py" in ran.out
    assert "Begin with `jaxmem compare examples/gpt.py`" in run(capfd, "--help").out


def test_an_option_given_twice_is_refused(capfd):
    twice = ("--target", "cpu", "--target=gpu-h100")
    assert_refused(run(capfd, "compare", "model.py", *twice), "--target once", "Separate its values by commas")
    assert_refused(run(capfd, "analyze", "model.py", *twice), "--target once", "Only --set may be repeated")


def test_warnings_are_lines_like_errors(capfd, tmp_path):
    warn = "jaxmem.remat.checkpoint(len, jaxmem.Policy(rest='save', save=('a',)))"
    path = write(tmp_path, LINEAR.replace("params = {", f"{warn}\n        params = {{"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        ran = run(capfd, "residuals", path)
    assert ran.code == 0 and ran.err.startswith("jaxmem: warning: The remat policy (save=a rest=save) keeps everything")
    assert ran.err.count("\n") == 1
