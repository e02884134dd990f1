"""`python -m jaxmem` is the `jaxmem` command."""

import sys

from jaxmem.cli import main

if __name__ == "__main__":
    sys.exit(main())
