"""`residuals`: what the forward pass of a function keeps for its backward pass, value by value."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxmem._shown import Brief, JsonRecord
from jaxmem.errors import InputError
from jaxmem.jaxprs import fused, is_on_host, num_bytes, origin, vjp_residuals
from jaxmem.policy import Policy, as_policy
from jaxmem.remat._checkpoint import checkpoint
from jaxmem.remat._queries import PolicyQueries, check_names
from jaxmem.targets import Tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual(Brief):
    """One value that is kept.

    Args:
      size_bytes: of the whole value, all iterations of a scan together.
      shape, dtype: of the value; a scan's iterations are its leading axes.
      name: what `checkpoint_name` called it; None without.
      op: the operation that made it; "carry (op)" for the input of a scan's body.
      module: path of flax modules and named scopes; "" at the top.
      source: FILE:LINE of the user's code; "" where unknown.
      count: number of scan iterations stacked in it, 1 without a scan.
      memory: "device", or "host" where it is offloaded.
      fused: follows element by element from one other that is kept, or an argument: where nothing is rematerialised,
        a TPU's compiler computes it where it is read.
      stored_bytes: that it takes in the memory of a TPU, whose tiles pad it; 0 where it is not stored. None where it
        takes `size_bytes`.
    """

    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    name: str | None = None
    op: str
    module: str = ""
    source: str = ""
    count: int = 1
    memory: str = "device"
    fused: bool = False
    stored_bytes: int | None = None

    @property
    def held_bytes(self) -> int:
        """`stored_bytes`, or `size_bytes` where these are the same."""
        return self.size_bytes if self.stored_bytes is None else self.stored_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualTable(JsonRecord, identity=("total_bytes", "host_bytes", "rows", "before", "provenance")):
    """The residuals of a function, the largest first; modelled.

    Args:
      rows: one for each value.
      before: the table without the policy, where there is one to compare with.
    """

    rows: tuple[Residual, ...]
    before: "ResidualTable | None" = None
    provenance: str = "modelled"

    @property
    def total_bytes(self) -> int:
        """Bytes of all values, wherever they are kept."""
        return sum(row.size_bytes for row in self.rows)

    @property
    def device_bytes(self) -> int:
        """Bytes of the values that stay on the device."""
        return sum(row.size_bytes for row in self.rows if row.memory == "device")

    @property
    def host_bytes(self) -> int:
        """Bytes of the values that are offloaded."""
        return self.total_bytes - self.device_bytes

    @property
    def stored_bytes(self) -> int:
        """As `device_bytes`, but as they are stored: see `stored_in`."""
        return sum(row.held_bytes for row in self.rows if row.memory == "device")

    def stored_in(self, tiles: Tiles | None, *, plain: bool = False) -> "ResidualTable":
        """The table with the bytes that values take in tiles; itself where there are none.

        Args:
          tiles: of a target.
          plain: nothing is rematerialised, so that the compiler computes fused values where they are read.
        """
        if tiles is None:
            return self
        sizes = [_stored(row, tiles, plain) for row in self.rows]
        rows = (
            dataclasses.replace(row, stored_bytes=size if size != row.size_bytes else None)
            for row, size in zip(self.rows, sizes, strict=True)
        )
        return dataclasses.replace(self, rows=tuple(rows))

    def bytes_by(self, field: str) -> dict[Any, int]:
        """Bytes for each value of a field of `Residual`, the largest first.

        >>> import jax.numpy as jnp
        >>> residuals(lambda x: jnp.sin(jnp.sin(x)), jnp.ones(8)).bytes_by("op")
        {'cos': 64}
        """
        sums: dict[Any, int] = {}
        for row in self.rows:
            key = getattr(row, field)
            sums[key] = sums.get(key, 0) + row.size_bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """Rows and totals as JSON-ready values, with those `before` beside them."""
        fields = {"rows": [dataclasses.asdict(row) for row in self.rows], "provenance": self.provenance}
        fields |= {name: getattr(self, name) for name in ("total_bytes", "device_bytes", "host_bytes", "stored_bytes")}
        return fields | ({"before": self.before.to_dict()} if self.before is not None else {})


def residuals(fn: Callable, *args, argnums: int | None = None, policy: str | Policy | None = None) -> ResidualTable:
    """The values that `jax.vjp(fn, *args)` keeps, besides the arguments themselves; modelled.

    Duplicates count once. Arguments do not count, since they are there anyway.
    The compiler may keep fewer (it fuses and recomputes cheap operations) or more (copies): residual
    bytes order policies, compiled bytes decide.

    Args:
      fn: function of floating-point pytrees with any pytree output; blocks in it may have policies already.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      argnums: the argument that is differentiated; None for all of them.
      policy: the policy of `fn` as one block; then `before` holds the table without it.

    Raises:
      UnmatchedNamesError: `fn` does not offer the policy's names.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    >>> table = residuals(lambda x: jnp.sum(jnp.tanh(x @ x) @ x), x, policy="dots")
    >>> table.before.total_bytes, [(row.op, row.size_bytes) for row in table.rows]
    (2048, [('dot_general', 1024)])
    """
    if not callable(fn):
        raise InputError(
            wanted="a differentiable function and its arguments",
            got=f"a {type(fn).__name__}",
            do="Write residuals(loss, params, batch); of a step it is step.residuals().",
        )
    before, queries = None, PolicyQueries()
    if policy is not None:
        policy = as_policy(policy)
        before = residuals(fn, *args, argnums=argnums)
        fn = queries.checkpoint(fn, policy) if policy.patterns else checkpoint(fn, policy)
    jaxpr, values = vjp_residuals(fn, *args, argnums=argnums)
    if policy is not None and policy.patterns and not policy.keeps_everything:
        check_names(policy, queries.names, where="the function")
    left = fused(jaxpr, values)
    rows = [_row(jaxpr, var, var in left) for var in values]
    return ResidualTable(rows=tuple(sorted(rows, key=lambda row: -row.size_bytes)), before=before)


def residual_bytes(fn: Callable, *args, argnums: int | None = None) -> int:
    """`residuals(...).device_bytes`, without looking up where each value comes from.

    >>> import jax, jax.numpy as jnp
    >>> residual_bytes(lambda x: jnp.sin(jnp.sin(x)), jax.ShapeDtypeStruct((256,), jnp.float32))
    2048
    """
    _, values = vjp_residuals(fn, *args, argnums=argnums)
    return sum(num_bytes(v.aval) for v in values if not is_on_host(v.aval))


def _stored(row: Residual, tiles: Tiles, plain: bool) -> int:
    if row.memory == "host" or (plain and row.fused):
        return row.size_bytes if row.memory == "host" else 0
    # The dtype of a key is a name that has no size.
    return tiles.stored_bytes(row.shape, row.size_bytes // max(1, math.prod(row.shape)))


def _row(jaxpr, var, left: bool) -> Residual:
    where = "host" if is_on_host(var.aval) else "device"
    shape, dtype = tuple(var.aval.shape), str(var.aval.dtype)
    made = dataclasses.asdict(origin(jaxpr, var))
    return Residual(size_bytes=num_bytes(var.aval), shape=shape, dtype=dtype, memory=where, fused=left, **made)
