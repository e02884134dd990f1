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
    # The page's nnx loop has the imports and the batches of the other.
    program = linen if request.param == "linen" else linen.split("params = model.init")[0] + nnx
    diffs = dict(zip(WANTS, blocks(LINEN if request.param == "linen" else NNX, "diff"), strict=True))
    return program, diffs, history(run(program))


def test_the_analysis_changes_nothing_and_counts_the_loops_own_state(loop):
    program, diffs, want = loop
    names = run(changed(program, diffs["analyze"]))
    assert_alike(history(names), want)
    held = [names["state"], names["batch"]] if "nnx" not in names else nnx_held(names)
    size = sum(np.dtype(leaf.dtype).itemsize * leaf.size for leaf in map(np.asarray, jax.tree.leaves(held)))
    assert names["report"].argument_bytes == pytest.approx(size, rel=0.01)  # counters that nothing reads are left out


def nnx_held(names: dict) -> list:
    return [names["nnx"].state(names["network"]), names["nnx"].state(names["optimizer"]), names["batch"]]


@pytest.mark.parametrize("want", ["accumulate", "remat"])
def test_gradients_of_the_changed_loop_are_the_plain_ones(loop, want):
    program, diffs, plain = loop
    assert_alike(history(run(changed(program, diffs[want]))), plain)


def test_policies_are_compared_by_what_the_loss_keeps(loop):
    program, diffs, plain = loop
    names = run(changed(program, diffs["compare"]))
    assert_alike(history(names), plain)
    none, full, dots = names["table"].rows
    assert none.saved_residual_bytes > dots.saved_residual_bytes > full.saved_residual_bytes > 0
    assert none.recompute_flops == 0 < full.recompute_flops


def test_each_change_is_at_most_three_lines_of_a_loop_of_sixty(loop):
    program, diffs, _ = loop
    assert all(0 < sum(line[0] == "+" for line in diff.splitlines()) <= 3 for diff in diffs.values())
    assert all(sum(line[0] == "-" for line in diff.splitlines()) <= 3 for diff in diffs.values())
    assert len(program.splitlines()) <= (60 if "network" not in program else 105)


def assert_alike(got: list, want: list) -> None:
    assert len(got) == len(want) == 5
    for now, then in zip(got, want, strict=True):
        assert now.keys() == then.keys()
        for name in now:
            np.testing.assert_allclose(now[name], then[name], rtol=2e-5, atol=1e-6, err_msg=name)
