"""The chip table and the names of targets; nothing is compiled, but the TPUs' bytes are asked of their compiler."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxmem.errors import DoesNotFitError, UnknownTargetError
from jaxmem.targets import CHIPS, KNOWN_TARGETS, compile_on, find_chip, resolve_target

TPUS = [chip for chip in CHIPS if chip.platform == "tpu"]
GPUS = [chip for chip in CHIPS if chip.platform == "gpu"]


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_a_row_is_whole_and_names_its_source(chip):
    assert re.match(r"https://[\w.-]+\.\w+/\S+$", chip.source)
    assert 2**32 < chip.hbm_bytes < 2**38
    assert chip.usable_bytes > 2**32
    assert 1e11 < chip.hbm_bytes_per_second < 1e13
    assert 1e10 < chip.interconnect_bytes_per_second < 1e12
    assert chip.host_bytes_per_second is None or 5e9 < chip.host_bytes_per_second < 1e11
    assert all(1e12 < rate < 1e16 for _, rate in chip.flops_per_second)
    assert chip.native_bfloat16 == (chip.flops("bfloat16") is not None)


def test_what_was_asked_for_is_in_the_table():
    asked = "v2 v3 v4 v5e v5p v6e", "t4 v100 l4 a10g a100-40g a100-80g h100 h200 b200 rtx3090 rtx4090"
    names = {f"tpu-{name}" for name in asked[0].split()} | {f"gpu-{name}" for name in asked[1].split()}
    assert names <= set(KNOWN_TARGETS) and {"local", "cpu", "tpu-7x"} <= set(KNOWN_TARGETS)


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_a_tpus_usable_bytes_are_what_its_compiler_says(chip):
    rows = jax.ShapeDtypeStruct((256, 1024, 1024, 1024), jnp.float32)  # 1 TiB
    with pytest.raises(DoesNotFitError, match=f"fits a device of {chip.name}") as caught:
        compile_on(chip.name, jnp.sin, rows)
    assert caught.value.available_bytes == chip.usable_bytes
    assert caught.value.needed_bytes == pytest.approx(2 * 2**40, rel=0.01)  # what goes in and what comes out


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("tpu-v2", "TPU v2", 2),
        ("tpu-v3:2x2", "TPU v3", 8),
        ("tpu-v4:2x2x1", "TPU v4", 4),
        ("tpu-v5e:1x1", "TPU v5 lite", 1),
        ("tpu-v5e:2x4", "TPU v5 lite", 8),
        ("tpu-v5p:4x4x4", "TPU v5", 64),
        ("tpu-v6e", "TPU v6 lite", 1),
        ("tpu-7x:2x2x1", "TPU7x", 8),
        ("gpu-t4", "Tesla T4", 1),
        ("gpu-h100:1x8x8", "NVIDIA H100 80GB HBM3", 64),
    ],
)
def test_a_target_has_the_devices_that_jax_would_show(name, kind, count):
    target = resolve_target(name)
    assert len(target.devices) == target.device_count == count
    assert {device.device_kind for device in target.devices} == {kind}
    assert {device.platform for device in target.devices} == {target.platform}
    assert target.mesh.shape == {"data": count}


def test_two_names_of_a_thing_are_one():
    assert resolve_target("tpu-v5e").topology == resolve_target("tpu-v5e:1x1").topology
    assert resolve_target("tpu-v4:2x2").topology == resolve_target("tpu-v4:2x2x1").topology == "2x2x1"
    assert find_chip("tpu-ironwood") is find_chip("TPU-7x")
    assert find_chip("gpu-rtx-4090") is find_chip("gpu-rtx4090")
    assert resolve_target("gpu-h100") == resolve_target("gpu-h100")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpu-a100", "Did you mean gpu-a100-40g or gpu-a100-80g?"),
        ("gpu-h10", "Did you mean gpu-h100?"),
        ("h100", "local, cpu, tpu-v2"),
        (
            "tpu-v5e:0x1",
            "2 sides, each 1 or even, at most 256 chips in all; got 'tpu-v5e:0x1'. Use for example tpu-v5e:1x1",
        ),
        ("tpu-v5e:3x5", "each 1 or even"),
        ("tpu-v5e:32x32", "at most 256 chips"),
        ("tpu-v5e:2x2x2", "2 sides"),
        ("tpu-v5e:", "2 sides"),
        ("tpu-v5p:4x4x4x4", "3 sides"),
        ("gpu-h100:8", "gpu-h100:SLICESxHOSTSxGPUS"),
        ("gpu-h100:1x0x8", "gpu-h100:1x1x8 for one host of eight"),
        ("gpu-h100:999999x999999x9", "at most 65536"),
    ],
)
def test_a_name_that_is_none_says_what_exists(name, said):
    with pytest.raises(UnknownTargetError) as caught:
        resolve_target(name)
    assert said in str(caught.value)


def test_a_gpus_usable_bytes_follow_the_allocators_share(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    chip = find_chip("gpu-h100")
    assert resolve_target("gpu-h100").memory_bytes == int(0.75 * chip.hbm_bytes)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    target = resolve_target("gpu-h100:1x1x8")
    assert target.memory_bytes == int(0.9 * chip.hbm_bytes)
    assert any("XLA_PYTHON_CLIENT_MEM_FRACTION=0.9" in note for note in target.notes)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    assert resolve_target("gpu-h100").memory_bytes == int(0.75 * chip.hbm_bytes)


def test_mesh_axes_must_multiply_to_the_devices():
    target = resolve_target("tpu-v5e:4x4").with_mesh(data=4, model=4)
    assert target.mesh.shape == {"data": 4, "model": 4}
    with pytest.raises(UnknownTargetError, match="multiply to the 16 device"):
        target.with_mesh(data=3)


def test_capabilities_follow_the_generation():
    assert [chip.name for chip in GPUS if not chip.cudnn_attention] == ["gpu-v100", "gpu-v100-32g", "gpu-t4"]
    assert {chip.name for chip in GPUS if chip.native_float8} == {
        f"gpu-{name}" for name in ("l4", "h100", "h200", "b200", "rtx4090")
    }
