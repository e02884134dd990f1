"""What a shell offers for Tab: targets, presets, settings, and functions of a file. JAX is not imported."""

import ast
import contextlib
import glob
import io
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

from jaxmem.policy import PRESETS

DTYPES = ("float32", "bfloat16", "float16", "float64")  # a test holds them equal to those of `config`, which needs JAX
REMATS = (*PRESETS, "auto:0.25", "auto:6GiB")
_SHELL = "_JAXMEM_COMPLETE"  # set by the script that --install-completion writes
_TABLES = pathlib.Path(__file__).parent.parent / "targets"
_CHIP = re.compile(r'^        name="(tpu-[^"]+)"|^    _gpu\(\n        "([^"]+)"', re.MULTILINE)


def targets() -> list[str]:
    """The names of all targets, read from the source of the chip tables: importing these imports JAX.

    >>> targets()[:3], "gpu-h100" in targets()
    (['local', 'cpu', 'tpu-v2'], True)
    """
    found = [_CHIP.findall((_TABLES / name).read_text(encoding="utf-8")) for name in ("_tpus.py", "_gpus.py")]
    return ["local", "cpu", *(tpu or f"gpu-{gpu}" for chips in found for tpu, gpu in chips)]


def complete_target(incomplete: str) -> list[str]:
    """Targets, or the next one of a list."""
    return next_of_list(incomplete, targets())


def complete_function(incomplete: str) -> list[str]:
    """FILE:FUNCTION for the functions of a file that mention a Workload; paths are left to the shell, but for fish."""
    path, _, name = incomplete.partition(":")
    if os.path.isfile(path):
        return [f"{path}:{function}" for function in _functions(path) if function.startswith(name)]
    if os.environ.get(_SHELL) != "complete_fish":
        return []
    return [found + os.sep for found in glob.glob(f"{path}*{os.sep}")] + glob.glob(f"{path}*.py")


def next_of_list(incomplete: str, known: Iterable[str]) -> list[str]:
    """Known names that begin so, each behind what stands before it in a list.

    >>> next_of_list("cpu,tpu-v5", ["cpu", "tpu-v5e", "tpu-v5p"])
    ['cpu,tpu-v5e', 'cpu,tpu-v5p']
    """
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in known if name.startswith(last) and name not in before.split(",")]


def _functions(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as stream:
            source = stream.read()
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError):
        return []
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    makers = [node.name for node in functions if "Workload" in (ast.get_source_segment(source, node) or "")]
    return makers or [node.name for node in functions]


@contextlib.contextmanager
def whole_words() -> Iterator[None]:
    """Has bash's words not end at a colon, where it splits `gpt.py:workload`; what it offers then begins behind it."""
    words = os.environ.get("COMP_WORDS", "").split("\n")
    at = int(os.environ.get("COMP_CWORD") or 0)
    if os.environ.get(_SHELL) != "complete_bash" or ":" not in words[: at + 1]:
        yield
        return
    joined: list[str] = []
    for place, word in enumerate(words[: at + 1]):
        if joined and ":" in (word, words[place - 1]):
            joined[-1] += word
        else:
            joined.append(word)
    os.environ.update(COMP_WORDS="\n".join(joined), COMP_CWORD=str(len(joined) - 1))
    behind = joined[-1].rpartition(":")[0]
    offered = io.StringIO()
    try:
        with contextlib.redirect_stdout(offered):
            yield
    finally:
        sys.stdout.write("\n".join(line.removeprefix(f"{behind}:") for line in offered.getvalue().splitlines()) + "\n")
