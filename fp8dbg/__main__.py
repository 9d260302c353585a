"""``python -m fp8dbg``: the command line."""

from fp8dbg.cli import main

main()
