"""The colours of the kinds can be told apart, with every kind of colour vision, in light and in dark."""

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

from jaxmem.analysis import KINDS

pytestmark = pytest.mark.once

# Machado, Oliveira and Fernandes 2009, https://doi.org/10.1109/TVCG.2009.113, severity 1.0, on linear sRGB.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])


def colours_in(sheet: str) -> dict[str, tuple[str, str]]:
    """Name → (light, dark) of a style sheet's colours."""
    text = (files("jaxmem.report") / "assets" / sheet).read_text()
    found = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", text)
    return {name.replace("-", "_"): (light, dark) for name, light, dark in found}


COLOURS, GROUPS = colours_in("kinds.css"), colours_in("groups.css")


def lab(colour: str, vision: str) -> np.ndarray:
    """CIE L*a*b* of a hex colour as somebody with that vision sees it; of "#ffffff" L* is 100."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISIONS[vision]) @ linear, 0, 1)
    ratio = XYZ @ seen / WHITE
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_kind_has_a_colour():
    assert set(COLOURS) == set(KINDS)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("of", ["kinds", "layer", "phase"])
def test_colours_of_one_set_are_told_apart(of, theme, vision):
    chosen = COLOURS if of == "kinds" else {name: c for name, c in GROUPS.items() if name.startswith(of)}
    assert len(chosen) >= 6
    seen = {name: lab(colours[theme], vision) for name, colours in chosen.items()}
    distances = {(a, b): np.linalg.norm(seen[a] - seen[b]) for a, b in itertools.combinations(seen, 2)}
    closest = min(distances, key=lambda pair: distances[pair])
    assert distances[closest] >= 10, (closest, distances[closest])
