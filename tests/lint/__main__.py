"""Runs every check of this package, prints the complaints and the sizes, and ends with 1 if there was a complaint.

python -m tests.lint
"""

import sys

from tests.lint import dependencies, pages, privates, prose, sizes

CHECKS = (prose.check, pages.check, dependencies.check, privates.check)


def main() -> int:
    """The exit status."""
    complaints = [line for check in CHECKS for line in check()]
    print("\n".join([*complaints, sizes.summary()]))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
