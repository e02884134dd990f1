"""How often a program reduces its gradients, counted in what compilers write."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.analysis.hlo._reductions import gradient_reductions


def test_a_reduction_in_a_loop_counts_every_turn():
    """Seven micro-batches, each reducing a (5, 3) gradient and a scalar among all eight devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(w, xs):
        def turn(w, x):
            return jnp.sin(w + jax.lax.psum(jnp.outer(x, w[0]), "data")) / (1 + jax.lax.psum(x.sum(), "data")), None

        return jax.lax.scan(turn, w, xs)[0]

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P()))
    module = parse_hlo(mapped.lower(jnp.ones((5, 3)), jnp.ones((7, 40))).compile().as_text())
    found = gradient_reductions(module, [(5, 3)], 8)
    assert found == (7.0, 7 * 4 * 15)
    assert gradient_reductions(module, [(5, 3)], 4) == (0.0, 0)  # of another group of devices
    assert gradient_reductions(module, [(4, 3), (2, 15)], 8) == (7 * 15 / 42, 7 * 4 * 15)  # a layer's part of a stack


TEXT = """HloModule m, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%joined (p: f32[12], q: f32[30]) -> f32[43] {
  %p = f32[12]{0} parameter(0)
  %q = f32[30]{0} parameter(1)
  %one = f32[1]{0} constant({1})
  ROOT %concatenate = f32[43]{0} concatenate(%p, %q, %one), dimensions={0}
}

%all-reduce-scatter (x: f32[8,64]) -> f32[1,64] {
  %x = f32[8,64]{1,0} parameter(0)
  %all-reduce = f32[8,64]{1,0} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%sum
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,64]{1,0} dynamic-slice(%all-reduce, %zero, %zero), dynamic_slice_sizes={1,64}
}

ENTRY %main (p: f32[12], q: f32[30], x: f32[8,64], y: f32[16,4]) -> (f32[43], f32[1,64], f32[2,4], f32[12]) {
  %p = f32[12]{0} parameter(0)
  %q = f32[30]{0} parameter(1)
  %x = f32[8,64]{1,0} parameter(2)
  %y = f32[16,4]{1,0} parameter(3)
  %wrapped = f32[43]{0} fusion(%p, %q), kind=kLoop, calls=%joined
  %start = f32[43]{0} all-reduce-start(%wrapped), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
  %done = f32[43]{0} all-reduce-done(%start)
  %fused = f32[1,64]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
  %scattered = f32[2,4]{1,0} reduce-scatter(%y), replica_groups=mesh['a'=8,'b'=1] {'a'}, dimensions={0}, to_apply=%sum
  %halves = f32[12]{0} all-reduce(%p), replica_groups=mesh['a'=4,'b'=2] {'b'}, to_apply=%sum
  ROOT %out = (f32[43]{0}, f32[1,64]{1,0}, f32[2,4]{1,0}, f32[12]{0}) tuple(%done, %fused, %scattered, %halves)
}
"""


def test_joined_arrays_fused_scatters_and_groups():
    """As a GPU's compiler joins arrays, a TPU's fuses a reduce-scatter, and newer XLA writes groups."""
    shapes = [(3, 4), (5, 6), (8, 64), (16, 4)]
    assert gradient_reductions(parse_hlo(TEXT), shapes, 8) == (1.0, 4 * (12 + 30 + 512 + 64))
