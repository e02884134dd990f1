"""Whose code a line is: one answer in the table of residuals, the report's buffers and the text of a crash."""

import concurrent.futures
import os
import re
import sysconfig

import jax
import jax.numpy as jnp
import pytest

from jaxmem._source import is_library, short_place
from jaxmem.analysis.attribution._frames import Frames
from jaxmem.analysis.oom import explain_oom
from jaxmem.remat import residuals

PURELIB = sysconfig.get_path("purelib")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
USERS = [
    "/home/me/train.py",
    "train.py",
    os.path.join(ROOT, "examples", "gpt.py"),
    os.path.join(ROOT, "tests", "test_source.py"),
    os.path.join(PURELIB, "mymodel", "layers.py"),
    os.path.join(PURELIB, "single_file_model.py"),
    os.path.join(PURELIB, "jax_models", "layers.py"),
    "/other/env/lib/python3.9/site-packages/transformers/modeling_flax_gpt2.py",
    "/usr/lib/python3/dist-packages/zoo/net.py",
    "C:\\env\\Lib\\site-packages\\zoo\\net.py",
    "<string>",
    "<ipython-input-3-5f2d>",
    "/tmp/ipykernel_12/345.py",
]
LIBRARIES = [
    jax.__file__,
    os.__file__,
    os.path.join(ROOT, "jaxmem", "_source.py"),
    os.path.join(PURELIB, "flax", "linen", "linear.py"),
    os.path.join(PURELIB, "equinox", "nn", "_linear.py"),
    "/other/env/lib/python3.9/site-packages/jax/_src/api.py",
    "/usr/lib/python3/dist-packages/numpy/core.py",
    "C:\\env\\Lib\\site-packages\\jax\\_src\\api.py",
    "/usr/lib/python3.9/contextlib.py",
    "<frozen runpy>",
    "<__array_function__ internals>",
]
MODEL = """
import jax, jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

@jax.jit
def jitted(x):
    return jnp.tanh(x)

def model(w, x):
    def layer(h, _):
        h = checkpoint_name(jnp.sin(h @ w), "hidden")
        return jitted(h) * h, None
    h, _ = jax.lax.scan(layer, x, None, length=2)
    return jnp.exp(h)
"""


@pytest.mark.parametrize("path", USERS)
def test_the_users(path):
    assert not is_library(path)


@pytest.mark.parametrize("path", LIBRARIES)
def test_the_libraries(path):
    assert is_library(path)


def model_in(path):
    """`MODEL`, as if it stood in a file there."""
    names = {}
    exec(compile(MODEL, path, "exec"), names)
    return names["model"]


def sources_of_residuals(loss, *args):
    table = residuals(loss, *args)
    return table, {short_place(row.source) for row in table.rows}


def sources_of_buffers(loss, *args):
    text = jax.jit(jax.value_and_grad(loss)).lower(*args).compile().as_text() or ""
    frames = Frames(text)
    return {str(frames.of(line)) for line in re.findall(r"metadata=\{[^}]*\}", text)}


@pytest.mark.parametrize(
    "path, shown",
    [
        (os.path.join(PURELIB, "zoo", "net.py"), "net.py"),
        ("/other/env/lib/python3.9/site-packages/zoo/net.py", "net.py"),
        ("<ipython-input-3-5f2d>", "In[3]"),
        ("/tmp/ipykernel_12/345.py", "345.py"),
        ("<string>", "<string>"),
        (os.path.join(PURELIB, "equinox", "net.py"), "test_source.py"),  # a framework's: the line that called it
    ],
)
def test_residuals_and_buffers_name_the_same_lines(path, shown):
    model = model_in(path)

    def loss(w, x):
        return jnp.sum(model(w, x) ** 2)

    table, of_residuals = sources_of_residuals(loss, jnp.ones((4, 4)), jnp.ones((8, 4)))
    of_buffers = sources_of_buffers(loss, jnp.ones((4, 4)), jnp.ones((8, 4)))
    assert of_residuals <= of_buffers
    assert any(source.startswith(f"{shown}:") for source in of_residuals)
    named = [row for row in table.rows if row.name == "hidden"]
    assert named and all(short_place(row.source).startswith(f"{shown}:") for row in named)


def test_where_all_frames_are_a_librarys_its_own_line_is_named():
    path = os.path.join(PURELIB, "flax", "zoo.py")
    names = {"jax": jax, "jnp": jnp, "residuals": residuals}
    source = "def loss(w):\n    return jnp.sum(jnp.sin(w) ** 2)\ndef trace(w):\n    return residuals(loss, w)"
    exec(compile(source, path, "exec"), names)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # a thread's own stack, on which no line of a user's is
        table = pool.submit(names["trace"], jnp.ones(4)).result()
    assert {row.source for row in table.rows} == {f"{path}:2"}


@pytest.mark.parametrize(
    "frame, where",
    [
        ('  File "/e/lib/python3.9/site-packages/zoo/net.py", line 7, in f', "net.py:7 in f"),
        ('  File "/usr/lib/python3.9/contextlib.py", line 7, in f', "train.py:1 in main"),
        ('  File "/e/site-packages/jax/_src/api.py", line 7, in f', "train.py:1 in main"),
        ('  File "<string>", line 7, in f', "<string>:7 in f"),
    ],
)
def test_the_text_of_a_crash_is_read_alike(frame, where):
    text = f'Traceback (most recent call last):\n  File "/a/train.py", line 1, in main\n{frame}\nMemoryError\n'
    assert explain_oom(text).where == where
