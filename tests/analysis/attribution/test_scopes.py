"""Scope paths as JAX and Flax write them, taken from compiled programs."""

import pytest

from jaxmem.analysis.attribution._scopes import Scope, parse_scope

pytestmark = pytest.mark.once

PATHS = {
    "jit(_step)/jvp(GPT)/while/body/closed_call/blocks/mlp_in/dot_general": (
        "forward",
        "GPT/blocks/mlp_in",
        "dot_general",
    ),
    "jit(_step)/transpose(jvp(GPT))/while/body/closed_call/blocks/norm_mlp/reduce_sum": (
        "backward",
        "GPT/blocks/norm_mlp",
        "reduce_sum",
    ),
    "jit(_step)/transpose(jvp(GPT))/while/body/closed_call/checkpoint/rematted_computation/blocks.call/blocks/split": (
        "recompute",
        "GPT/blocks",
        "split",
    ),
    "jit(_step)/jvp(GPT)/while/body/closed_call/blocks/Dropout_0/jit(_threefry_fold_in)/Dropout.__call__/xor": (
        "forward",
        "GPT/blocks/Dropout_0",
        "xor",
    ),
    "jit(_step)/jvp(GPT)/while/body/closed_call/blocks/bqhd,bkhd->bhqk/dot_general": (
        "forward",
        "GPT/blocks",
        "dot_general",
    ),
    "jit(_step)/jvp(GPT)/embed.attend/dot_general": ("forward", "GPT/embed", "dot_general"),
    "jit(_step)/jvp(jit(_take))/jit(_where)/select_n": ("forward", "", "select_n"),
    "jit(_step)/optimizer_update/mul": ("update", "", "mul"),
    "jit(_step)/while/body/accumulate_gradients/add": ("", "", "add"),
    "jit(f)/vmap(jvp(Net))/Dense_0/cond/branch_1_fun/tanh": ("forward", "Net/Dense_0", "tanh"),
    "jit(step)/transpose(jvp(loss))/shard_map/psum": ("backward", "loss", "psum"),
    "reduce_max": ("", "", "reduce_max"),
    "": ("", "", ""),
}


@pytest.mark.parametrize("path", PATHS)
def test_scope(path):
    assert parse_scope(path) == Scope(*PATHS[path])


def test_unbalanced_parentheses_do_no_harm():
    assert parse_scope("jit(f)/jvp((A/b/add").op
    assert parse_scope("jit(f)/a)/b/add").op == "add"
