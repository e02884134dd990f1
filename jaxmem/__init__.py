"""jaxmem: does my training step fit, and what is the cheapest way to make it fit?"""

