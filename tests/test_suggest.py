"""Names that do not exist are answered by what was probably meant."""

import pytest

import jaxmem
from jaxmem import MemoryConfig, Policy, Precision
from jaxmem.errors import ConfigError, JaxmemError
from jaxmem.policy import preset
from jaxmem.targets import resolve_target


@pytest.mark.parametrize(
    "make, meant",
    [
        (lambda: preset("fulll"), "full"),
        (lambda: preset("nothing_saveable"), "full"),
        (lambda: MemoryConfig(remat="6 GiB"), "auto:6GiB"),
        (lambda: MemoryConfig(remat="0.25"), "auto:0.25"),
        (lambda: MemoryConfig(remat="auto"), "auto:6GiB or auto:0.25"),
        (lambda: MemoryConfig(remat="auto:6G"), "6GiB"),
        (lambda: MemoryConfig(precision="bf16"), "bfloat16"),
        (lambda: Precision(compute="fp16"), "float16"),
        (lambda: MemoryConfig(remt="full"), "remat"),
        (lambda: MemoryConfig(dtype="bfloat16", acumulation_steps=2), "accumulation_steps and precision"),
        (lambda: MemoryConfig.from_json('{"remt": "full"}'), "remat"),
        (lambda: Policy(sav=("a",)), "save"),
        (lambda: resolve_target("h100"), "gpu-h100"),
        (lambda: resolve_target("V5E"), "tpu-v5e"),
        (lambda: resolve_target("a100"), "gpu-a100-40g or gpu-a100-80g"),
        (lambda: resolve_target("CPU"), "cpu"),
    ],
)
def test_what_was_probably_meant(make, meant):
    with pytest.raises(JaxmemError, match=rf"Did you mean {meant}\\?"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: preset("xyz"),
        lambda: MemoryConfig(precision="float8_e4m3fn"),  # a dtype, and not a slip
        lambda: MemoryConfig(unheard_of=1),
        lambda: resolve_target("abacus"),
        lambda: resolve_target("gpu"),
    ],
)
def test_nothing_is_guessed_where_nothing_is_close(make):
    with pytest.raises(JaxmemError) as refused:
        make()
    assert "Did you mean" not in str(refused.value)


def test_a_field_without_its_name_is_a_type_error_too():
    with pytest.raises(TypeError, match="fields of MemoryConfig by their names: accumulation_steps"):
        MemoryConfig(4)
    with pytest.raises(ConfigError, match="got 'full'"):
        MemoryConfig("full")


def test_a_name_that_the_package_does_not_have():
    with pytest.raises(AttributeError, match="no attribute 'analyse'. Did you mean analyze?"):
        getattr(jaxmem, "analyse")  # noqa: B009
