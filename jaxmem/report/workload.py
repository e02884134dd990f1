"""A workload for a terminal, as rich renderables: what is trained, by shapes."""

from typing import Any

import jax
from rich.console import Group
from rich.text import Text

from jaxmem._shown import array_type, arrays_in_words, is_array, name_of
from jaxmem.report.terminal import table
from jaxmem.train import make_train_step
from jaxmem.workload import Workload, optimizer_name, path_string

_MOST = 12


def render_workload(workload: Workload) -> Group:
    """The loss, the optimizer, the arrays of the state by their first names, and the leaves of the batch.

    What a key makes is traced for its shapes; nothing is computed.
    """
    state = make_train_step(workload).abstract_state()
    made = table(("what", "is"), header=False)
    made.add_row("loss", Text(name_of(workload.loss_fn)))
    made.add_row("optimizer", Text(optimizer_name(workload.optimizer)))
    made.add_row("parameters", arrays_in_words(state.params))
    parts = state.params.items() if isinstance(state.params, dict) and len(state.params) > 1 else ()
    _parts(made, [(f"  {name}", arrays_in_words(part)) for name, part in parts])
    made.add_row("optimizer state", arrays_in_words(state.opt_state))
    if jax.tree.leaves(state.state):
        made.add_row("model state", arrays_in_words(state.state))
    made.add_row("batch", arrays_in_words(workload.batch))
    leaves = jax.tree_util.tree_leaves_with_path(workload.batch)
    _parts(made, [(f"  {path_string(path) or '(the array)'}", _shape(leaf)) for path, leaf in leaves])
    return Group(Text("workload\n", style="bold"), made)


def _parts(made: Any, rows: list[tuple[str, str]]) -> None:
    for name, text in rows[:_MOST]:
        made.add_row(Text(name), Text(text))
    if len(rows) > _MOST:
        made.add_row(f"  and {len(rows) - _MOST} more", "")


def _shape(leaf: Any) -> str:
    return array_type(leaf) if is_array(leaf) else type(leaf).__name__
