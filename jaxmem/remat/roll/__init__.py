"""Rolling: repeated unrolled blocks run as one scan."""

from jaxmem.remat.roll._roll import rolled as rolled
