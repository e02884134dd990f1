import pytest

from jaxmem.analysis._fits import judge_fit

pytestmark = pytest.mark.once

GIB = 2**30


@pytest.mark.parametrize(
    ("peak", "capacity", "fits", "reason"),
    [
        (8 * GIB, 16 * GIB, "yes", "the peak, 8.00 GiB, leaves more than the 5% reserve of 16.00 GiB"),
        (16 * GIB - 1, 16 * GIB, "uncertain", "leaves less than the 5% reserve"),
        (16 * GIB + 1, 16 * GIB, "no", "exceeds the 16.00 GiB of a device"),
        (8 * GIB, None, "uncertain", "memory of this target is unknown"),
        (None, 16 * GIB, "uncertain", "no memory analysis"),
    ],
)
def test_verdicts(peak, capacity, fits, reason):
    verdict, why = judge_fit(peak, capacity)
    assert verdict == fits
    assert reason in why


def test_arguments_that_exceed_the_device_do_not_fit_even_without_an_analysis():
    assert judge_fit(None, GIB, at_least_bytes=2 * GIB)[0] == "no"
    assert judge_fit(None, GIB, at_least_bytes=GIB // 2)[0] == "uncertain"
