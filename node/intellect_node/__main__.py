"""`python -m intellect_node`."""

from .cli import main

if __name__ == "__main__":
    main()
