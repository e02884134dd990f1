"""jaxmem's tests; a package so that helpers can be imported as `tests.…` whatever else is installed."""
