"""Which leaves of a tree a `trainable` picks."""

import re
from typing import Any

import jax
import numpy as np

from jaxmem.errors import WorkloadError
from jaxmem.workload import is_creator, path_string


def nothing_trained(params) -> WorkloadError:
    """What a `trainable` that picks none of the parameters raises."""
    paths = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return WorkloadError(
        wanted="`trainable` to pick at least one parameter",
        got="none" if paths else "a workload without parameters",
        do=f"Its paths are, for example: {', '.join(paths[:3]) or '-'}.",
    )


def select_paths(tree, selection) -> Any:
    """A pytree of bools: which leaves a `trainable`-like selection picks (regex, function or prefix).

    Raises:
      WorkloadError: on a regular expression that does not compile, or a tree that is no prefix of bools.
    """
    if selection is None:
        return jax.tree.map(lambda _: True, tree)
    if isinstance(selection, str):
        try:
            pattern = re.compile(selection)
        except re.error as error:
            raise WorkloadError(
                wanted="trainable to be a regular expression", got=f"{selection!r} ({error})", do="Correct it."
            ) from None
        return jax.tree_util.tree_map_with_path(lambda p, _: bool(pattern.search(path_string(p))), tree)
    if is_creator(selection):  # an Equinox module of bools may be callable too
        return jax.tree_util.tree_map_with_path(lambda p, leaf: bool(selection(path_string(p), leaf)), tree)
    try:
        chosen = jax.tree.broadcast(selection, tree)
    except ValueError as error:
        raise WorkloadError(
            wanted="trainable to be a pytree prefix of the parameters",
            got=str(error).splitlines()[0],
            do="Give one bool per subtree, a regular expression, or a function (path, leaf) -> bool.",
        ) from None
    for path, leaf in jax.tree_util.tree_leaves_with_path(chosen):
        if not isinstance(leaf, (bool, np.bool_)):
            raise WorkloadError(
                wanted="trainable to be a pytree prefix of bools",
                got=f"{leaf!r} at {path_string(path, root='trainable')}",
                do="Give True or False there.",
            )
    return chosen
