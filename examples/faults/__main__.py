"""``python -m examples.faults NAME OUT``: record a run with one planted fault, to report it."""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.faults import GALLERY, Case, record


def main() -> None:
    """Record the fault that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(GALLERY), help="the fault")
    parser.add_argument("out", type=Path, help="run folder to write; new or empty")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    fault = GALLERY[given.name]
    record(given.out, fault, Case("small", given.seed))
    print(f"Planted: {fault.says(Case('small', given.seed))}\nfp8dbg report {given.out}\nfp8dbg recommend {given.out}")


if __name__ == "__main__":
    main()
