"""The doctor: each check from made-up facts, and the whole on this machine."""

import json

import pytest

from jaxmem.cli import _probes
from jaxmem.cli._checks import (
    check_backend,
    check_gpu_compiler,
    check_packages,
    check_settings,
    check_tpu_compiler,
    pinned_libtpu,
)
from tests.cli.helpers import run

GOOD = {
    "jax": "0.12.0.1", "jaxlib": "0.12.0", "flax": "0.12.12", "optax": "0.2.8", "orbax-checkpoint": "0.12.8",
    "libtpu": "0.0.50", "jax-cuda12-plugin": "0.12.0", "nvidia-cuda-nvcc-cu12": "12.9", "nvidia-cudnn-cu12": "9.1",
}  # fmt: skip


@pytest.mark.parametrize(
    "change, name, cure",
    [
        ({"flax": None}, "flax", "pip install flax"),
        ({"jax": "0.9.1", "jaxlib": "0.9.1"}, "jax", 'pip install "jax>=0.10.2"'),
        ({"jaxlib": "0.12.1"}, "jaxlib", "pip install jaxlib==0.12.0.1"),
    ],
)
def test_packages_that_cannot_work_are_broken(change, name, cure):
    assert {check.status for check in check_packages(GOOD)} == {"ok"}
    broken = [check for check in check_packages({**GOOD, **change}) if check.status == "broken"]
    assert [(check.name, check.cure) for check in broken] == [(name, cure)]


@pytest.mark.parametrize(
    "version, pinned, status",
    [
        (None, "0.0.50.*", "warn"),
        ("0.0.50", "0.0.50.*", "ok"),
        ("0.0.50.1", "0.0.50.*", "ok"),
        ("0.0.52", "0.0.50.*", "ok"),
        ("0.0.42", "0.0.50.*", "warn"),
        ("0.0.42", None, "ok"),
    ],
)
def test_libtpu_may_be_newer_than_the_pin_but_not_older(version, pinned, status):
    check = check_tpu_compiler({**GOOD, "libtpu": version}, pinned)
    assert check.status == status
    assert bool(check.cure) == (status == "warn")


def test_the_pin_is_read_from_jax_itself():
    import importlib.metadata

    assert pinned_libtpu(importlib.metadata.requires("jax")).startswith("0.0.")
    assert pinned_libtpu(["numpy"]) is None


@pytest.mark.parametrize(
    "change, cure",
    [
        ({"jax-cuda12-plugin": None}, 'pip install "jaxmem[gpu-aot]"'),
        ({"jax-cuda12-plugin": "0.11.2"}, "pip install jax-cuda12-plugin==0.12.0"),
        ({"nvidia-cudnn-cu12": None}, "pip install nvidia-cudnn-cu12"),
    ],
)
def test_the_gpu_compiler_must_match_jaxlib_and_be_whole(change, cure):
    assert check_gpu_compiler(GOOD).status == "ok"
    check = check_gpu_compiler({**GOOD, **change})
    assert (check.status, check.cure) == ("warn", cure)


def test_a_backend_that_does_not_start_is_broken_and_an_idle_accelerator_is_a_warning():
    assert check_backend({"error": "boom"}, [])[0].status == "broken"
    probe = {"backend": "cpu", "devices": {"cpu": 2}, "memory_bytes": 2**31, "memory_of": "of this machine"}
    backend, memory = check_backend(probe, [])
    assert (backend.status, backend.found, memory.found) == ("ok", "cpu: 2 x cpu", "2.00 GiB of this machine")
    assert check_backend(probe, ["/dev/nvidia0"])[0].status == "warn"


@pytest.mark.parametrize(
    "name, value, status",
    [
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9", "ok"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "90", "warn"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "most", "warn"),
        ("JAX_DISABLE_JIT", "1", "broken"),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=8", "warn"),
        ("JAX_PLATFORMS", "cpu", "ok"),
    ],
)
def test_settings(name, value, status):
    (check,) = check_settings({name: value, "HOME": "/root"}, {})
    assert (check.name, check.status) == (name, status)
    assert bool(check.cure) == (status != "ok")


def test_the_doctor_on_this_machine_as_json(capfd):
    ran = run(capfd, "doctor", "--json", "-")
    checks = {check["name"]: check for check in json.loads(ran.out)["checks"]}
    assert ran.code == 0 and ran.err == ""
    assert checks["backend"]["found"].startswith("cpu: 8 x")
    assert checks["Python"]["status"] == checks["jax"]["status"] == "ok"
    for target in ("tpu-v5e", "gpu-h100"):
        check = checks[f"compiling for {target}"]
        assert check["status"] == "ok" and check["found"].startswith("a program of 256.0 KiB in ")


def test_a_backend_that_aborts_is_reported_not_shared(capfd, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag")
    ran = run(capfd, "doctor")
    assert ran.code == 1
    assert "broken" in ran.out and "--xla_no_such_flag" in ran.out and "Unset XLA_FLAGS" in ran.out


def test_a_backend_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(_probes, "SECONDS", 0.01)
    assert "did not start within" in _probes.probe_jax()["error"]


def test_a_compiler_that_fails_or_hangs_is_a_warning_with_a_cure(monkeypatch):
    (check,) = _probes.probe_compilers(["gpu-h10"])
    assert (check.status, check.cure) == ("warn", "Did you mean gpu-h100?")
    monkeypatch.setattr(_probes, "SECONDS", 0.01)
    (check,) = _probes.probe_compilers(["tpu-v5e"])
    assert check.status == "warn" and "not done within" in check.found
