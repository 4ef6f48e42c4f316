"""`python -m intellect_coordinator`."""

from .cli import main

if __name__ == "__main__":
    main()
