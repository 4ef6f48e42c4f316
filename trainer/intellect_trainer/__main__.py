"""`python -m intellect_trainer`."""

from .cli import main

main()
