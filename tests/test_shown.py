"""Every public class has a `repr` of one short line, whatever an object holds."""

import dataclasses
import tempfile
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem import MemoryConfig, Policy, Precision, TrainState, Workload, checkpoint, make_train_step, remat
from jaxmem.accumulate import value_and_grad
from jaxmem.train import Verifier
from tests.test_public_api import public_names


class Untouched:
    """An array whose values nobody may ask for."""

    shape, dtype, size = (1024, 1024), jnp.dtype("float32"), 1024 * 1024

    def __repr__(self):
        raise AssertionError("the values were asked for")


MONSTERS = ("x" * 10_000, tuple("y" * 999 for _ in range(999)), Untouched(), {"w": [Untouched()] * 99}, 2**70, "a\nb")


def public_classes() -> list[type]:
    """Every class that a public module shows, but exceptions."""
    found: dict[type, None] = {}

    def walk(value):
        if isinstance(value, types.ModuleType):
            for name in public_names(value):
                walk(getattr(value, name))
        elif isinstance(value, type) and not issubclass(value, Exception):
            found[value] = None

    for name in jaxmem.__all__:
        walk(getattr(jaxmem, name))
    return list(found)


def filled(cls: type, value) -> object:
    """An instance that holds `value` in every field, whether or not it may."""
    made = object.__new__(cls)
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        object.__setattr__(made, field.name, value)
    return made


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


WORKLOAD = Workload(loss, jnp.full((4, 4), 0.125), jnp.ones((8, 4)), optax.adamw(1e-3))
STEP = make_train_step(WORKLOAD, MemoryConfig(accumulation_steps=2), target="cpu")
FOLDER = tempfile.mkdtemp() + "/" + "x" * 200
MADE = (WORKLOAD, STEP, remat.auto(loss, "6GiB"), Verifier(), checkpoint.Manager(FOLDER))
"""Of the classes that compute what they show, or are no dataclasses."""
COMPUTED = {"Comparison", "Verification", "Examination", "ResidualTable", "Equivalence", "Target", "Diff", "Frontier"}


@pytest.mark.parametrize("cls", public_classes(), ids=lambda cls: cls.__name__)
def test_a_public_class_has_a_short_repr(cls):
    made = [each for each in MADE if type(each) is cls]
    if not made and cls.__name__ not in COMPUTED:  # whose records are shown in tests/report/test_shown.py
        assert dataclasses.is_dataclass(cls), "add one to MADE"
        made = [filled(cls, monster) for monster in MONSTERS]
    for each in made:
        assert len(repr(each)) < 200 and "\n" not in repr(each) and cls.__name__ in repr(each)


@pytest.mark.parametrize(
    "value",
    [
        MemoryConfig(accumulation_steps=8, remat="full", precision="bfloat16"),
        MemoryConfig(remat=Policy(save=("a", "b"), dots="no_batch"), precision=Precision(compute="float16")),
        Policy(offload=("re:(q|k|v)_proj",)),
    ],
)
def test_a_short_value_is_the_code_that_makes_it(value):
    assert eval(repr(value)) == value


def test_a_workload_says_what_is_trained_and_holds_no_values():
    said = repr(WORKLOAD)
    for part in ("loss=loss", "scale_by_adam", "1 array of 16 numbers, 64 B", "batch: float32[8, 4]"):
        assert part in said
    assert "0.125" not in said and "0x" not in said
    assert "optimizer state" in str(WORKLOAD) and "0.125" not in str(WORKLOAD)


def test_a_state_is_told_by_its_shapes_even_when_it_is_gone():
    state = STEP.init()
    gradients = value_and_grad(loss, 2)(state.params, WORKLOAD.batch)
    STEP(state, WORKLOAD.batch)  # donates it
    assert "params=float32[4,4]" in repr(state) and "TrainState" in repr(state)
    assert "grads=float32[4,4]" in repr(gradients)
    told = []
    jax.jit(lambda state: told.append(repr(state)))(STEP.init())
    assert told == [repr(state)]
    assert isinstance(state, TrainState)


def test_what_a_step_is_made_of():
    assert "accumulation_steps=2" in repr(STEP) and "target=cpu" in repr(STEP)
    assert "loss" in repr(remat.auto(loss, "6GiB")) and "6GiB" in repr(remat.auto(loss, "6GiB"))
