"""The names in the examples' blocks are MaxText's, in its places: every preset applies, and keeps what it says."""

import functools
import itertools

import pytest

from examples import gpt, llama, vit_nnx
from jaxmem import MemoryConfig, make_train_step
from jaxmem.policy import PRESETS

EXAMPLES = {"gpt": gpt, "llama": llama, "vit": vit_nnx}
QKV = {
    "gpt": {"qkv_proj"},  # one product makes all three
    "vit": {"qkv_proj"},
    "llama": {"query_proj", "key_proj", "value_proj"},
}
MLP = {"gpt": {"mlpwi"}, "vit": {"mlpwi"}, "llama": {"mlpwi_0", "mlpwi_1"}}

# What is kept besides queries, keys and values. "mlpwo" never is: it goes into a sum, and no derivative needs it.
KEPT = {
    "save_qkv_proj": set(),
    "save_dot_except_mlp": {"out_proj"},
    "save_dot_except_mlpwi": {"out_proj"},
    "save_dot_with_context_except_mlp": {"out_proj", "context"},
    "minimal": {"out_proj", "mlp"},
    "minimal_with_context": {"out_proj", "mlp", "context"},
}


def step_of(name, remat):
    """Two layers where they are scanned, else one."""
    workload = EXAMPLES[name].workload(layers=1 if name == "vit" else 2)
    return make_train_step(workload, MemoryConfig(remat=remat))


@functools.cache
def residuals(name, remat):
    return step_of(name, remat).examine().residuals


def kept_names(table):
    return {row.name for row in table.rows} - {None}


def expected(name, remat):
    if remat == "save_out_proj":
        return {"out_proj"}
    kept = KEPT[remat]
    return QKV[name] | (kept - {"mlp"}) | (MLP[name] if "mlp" in kept else set())


# Every preset on one model; on the others those of which one has all names, the other few.
@pytest.mark.parametrize(
    "name, remat",
    [("gpt", remat) for remat in (*KEPT, "save_out_proj")]
    + list(itertools.product(("llama", "vit"), ("minimal_with_context", "save_dot_except_mlp"))),
)
def test_a_preset_keeps_what_it_says_and_nothing_else(name, remat):
    table = residuals(name, remat)
    named_bytes = sum(row.size_bytes for row in table.rows if row.name)
    assert kept_names(table) == expected(name, remat)
    assert table.total_bytes == residuals(name, "full").total_bytes + named_bytes
    assert table.total_bytes < residuals(name, "none").total_bytes / 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_minimal_is_every_product_without_batch_dimensions(name):
    assert residuals(name, "minimal").total_bytes == residuals(name, "dots_no_batch").total_bytes


def test_every_preset_that_saves_by_name_is_here():
    tested = {PRESETS[name] for name in (*KEPT, "save_out_proj")}
    assert {policy for policy in PRESETS.values() if policy.save} == tested


@pytest.mark.parametrize("name", EXAMPLES)
def test_without_the_names_it_is_the_same_program(name, monkeypatch):
    named = step_of(name, "full").lower().as_text()
    monkeypatch.setattr(EXAMPLES[name], "checkpoint_name", lambda x, name: x)
    assert step_of(name, "full").lower().as_text() == named
