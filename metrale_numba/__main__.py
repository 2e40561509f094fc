"""Lets ``python -m metrale_numba`` stand for the command ``metrale-numba``; promises nothing beyond."""

from metrale_numba.cli import main

if __name__ == "__main__":
    main(prog_name="metrale-numba")
