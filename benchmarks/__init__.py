"""Measurements behind jaxmem's claims: `python -m benchmarks.NAME --json -` prints one JSON object."""
