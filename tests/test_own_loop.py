"""Each change to a loop of the user's own, as docs/own-loop.md prints it: three lines at most, and equal results."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "own-loop.md").read_text(encoding="utf-8")
LINEN, NNX = re.findall(r"^## The plain loop, (?:linen|nnx)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
WANTS = ("analyze", "accumulate", "remat", "compare")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def changed(program: str, diff: str) -> str:
    """A program with a diff applied: added imports come first, other lines where their neighbours are."""
    lines, at = program.splitlines(), len(program.splitlines())
    for line in diff.splitlines():
        mark, text = line[0], line[1:]
        if mark == "+" and text.startswith(("import ", "from ")):
            lines.insert(0, text)
            at += 1
        elif mark == "+":
            lines.insert(at, text)
            at += 1
        else:
            assert lines.count(text) == 1, text
            at = lines.index(text) + (mark == " ")
            if mark == "-":
                del lines[at]
    return "\n".join(lines)


def run(program: str) -> dict:
    names = {"__name__": "loop"}
    exec(compile(program, "own-loop.md", "exec"), names)
    return names


def history(names: dict) -> list:
    return jax.device_get(names["history"])


@pytest.fixture(scope="module", params=["linen", "nnx"])
def loop(request):
    (linen,), (nnx,) = blocks(LINEN, "python")[:1], blocks(NNX, "python")[:1]
    program = linen if request.param == "linen" else linen + nnx
    diffs = dict(zip(WANTS, blocks(LINEN if request.param == "linen" else NNX, "diff"), strict=True))
    return program, diffs, history(run(program))
