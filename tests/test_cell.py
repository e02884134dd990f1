"""What IPython shows of errors: one run of its shell in a process of its own, a cell after the other."""

import json
import os
import subprocess
import sys

import pytest

CELLS = {
    "setup": """
import jax, jax.numpy as jnp, optax, jaxmem
from jaxmem import MemoryConfig, Workload
loss = lambda w, x: jnp.mean((x @ w) ** 2)
workload = Workload(loss, jnp.ones((4, 4)), jnp.ones((8, 4)), optax.sgd(0.1))
""",
    "preset": "def go():\n    return MemoryConfig(remat='fulll')\ngo()",
    "verbose": "%xmode Verbose\nMemoryConfig(remat='fulll')",
    "context": "%xmode Context",
    "users": """
def broken(w, x):
    return {}['k']
jaxmem.analyze(Workload(broken, workload.params, workload.batch, optax.sgd(0.1)))
""",
    "jax": "jaxmem.analyze(jnp.dot, jnp.ones((2, 3)), jnp.ones((2, 3)), target='cpu')",
    "compare": "jaxmem.compare({'a': lambda x: jnp.dot(x, jnp.ones(9))}, jnp.ones(3), target='cpu')",
    "batch": "step = jaxmem.make_train_step(workload)\nstate = step.init()\nstep(state, jnp.ones((8, 5)))",
    "sources": """
def named(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)
report = jaxmem.analyze(Workload(named, workload.params, workload.batch, optax.sgd(0.1)), target="cpu")
print({b.source.replace(str(len(In) - 1), "NOW") for b in report.buffers if b.source})
print("tanh", jaxmem.remat.residuals(named, workload.params, workload.batch))
print("code", "jnp.mean(jnp.tanh(x @ w) ** 2)" in {line.text.removeprefix("return ") for line in report.source_lines})
""",
    "before": "left = look()",
    # Ctrl-C in the middle of tracing, of a whole compile, and of training.
    "interrupted": """
def pressing(w, x):
    signal.raise_signal(signal.SIGINT)
    return loss(w, x)
jaxmem.compare({"a": MemoryConfig()}, Workload(pressing, workload.params, workload.batch, optax.sgd(0.1)), target="cpu")
""",
    "compiling": """
from jaxmem.analysis import _compiled
def press(*args):
    signal.raise_signal(signal.SIGINT)
_compiled.compile_noting, compile_noting = press, _compiled.compile_noting
try:
    jaxmem.analyze(workload, target="gpu-h100" if has_gpu else "cpu")
finally:
    _compiled.compile_noting = compile_noting
""",
    "training": """
def data(window):
    if window == 2:
        signal.raise_signal(signal.SIGINT)
    return workload.batch
state = jaxmem.train_loop(step, step.init(), data, 100)
print("windows:", int(state.window))
""",
    "after": "print('left:', look() == left, jaxmem.analyze(workload, target='cpu').peak_bytes > 0)",
}
PROGRAM = """
import contextlib, io, json, os, signal, sys, tempfile, warnings
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="NoColor")
def look():
    import jax
    settings = {name: jax.config._read(name) for name in ("jax_traceback_filtering", "jax_enable_x64")}
    links = [os.readlink(f"/proc/self/fd/{n}") for n in (1, 2)]
    files, handler = os.listdir(tempfile.gettempdir()), signal.getsignal(signal.SIGINT)
    return settings, links, files, dict(os.environ), str(jax.sharding.get_abstract_mesh()), handler
from jaxmem.errors import MissingCompilerError
from jaxmem.targets._gpu_compiler import check_installed
has_gpu = True
try:
    check_installed("gpu-h100")
except MissingCompilerError:
    has_gpu = False
shell.user_ns.update(look=look, signal=signal, has_gpu=has_gpu)
shown = {}
for name, cell in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        shell.run_cell(cell, store_history=True)
    shown[name] = out.getvalue()
print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> dict[str, str]:
    """Cell → what it printed."""
    own = tmp_path_factory.mktemp("tmp")
    environment = {**os.environ, "TMPDIR": str(own), "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython"))}
    environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(
        command, input=json.dumps(CELLS), capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def lines(text: str) -> list[str]:
    return [line for line in text.strip().splitlines() if line]


def test_an_error_of_jaxmem_is_the_users_lines_and_a_paragraph(shown):
    assert shown["setup"] == ""
    first, call, inner, made, said = lines(shown["preset"])
    assert first.endswith(", line 3") and call == "----> go()"
    assert inner.endswith(", line 2, in go") and made == "----> return MemoryConfig(remat='fulll')"
    assert said.startswith("UnknownPolicyError: Wanted a remat preset") and "Did you mean full?" in said


def test_the_users_own_error_is_shown_without_frames_of_jax_and_jaxmem(shown):
    *_, inside, raised, said = lines(shown["users"])
    assert inside.endswith(", line 2, in broken") and (raised, said) == ("----> return {}['k']", "KeyError: 'k'")
    for cell in ("users", "jax", "compare", "batch"):
        assert len(lines(shown[cell])) < 10 and "_variants.py" not in shown[cell], shown[cell]
    assert "TypeError: dot_general requires" in shown["jax"] and "TypeError: dot_general" in shown["compare"]
    assert "BatchError: Wanted a batch like the workload's" in shown["batch"] and "%xmode Verbose" in shown["batch"]


def test_a_line_of_a_cell_is_told_by_the_number_of_the_cell(shown):
    assert "'In[NOW]:2'" in shown["sources"] and "ipython-input" not in shown["sources"]
    assert "In[" in shown["sources"].partition("tanh")[2] and "code True" in shown["sources"]


def test_verbose_shows_all_frames(shown):
    assert "policy.py" in shown["verbose"] and len(lines(shown["verbose"])) > 20


def test_an_interrupted_cell_says_where_and_leaves_nothing(shown):
    for cell in ("interrupted", "compiling"):
        assert lines(shown[cell])[-1] == "KeyboardInterrupt" and len(lines(shown[cell])) < 10, shown[cell]
    assert "windows: 3" in shown["training"]
    assert shown["after"].strip() == "left: True True"
