"""`python -m aioprefill` is the command line."""

from aioprefill.cli import main

if __name__ == "__main__":
    main()
