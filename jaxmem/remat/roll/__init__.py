"""Rolling: repeated unrolled blocks run as one scan."""

from jaxmem.remat.roll._roll import Rolled as Rolled
from jaxmem.remat.roll._roll import RolledLayers as RolledLayers
from jaxmem.remat.roll._roll import roll as roll
from jaxmem.remat.roll._roll import rolled as rolled
from jaxmem.remat.roll._roll import what_rolls as what_rolls
