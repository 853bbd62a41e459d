"""``python -m tests.standin`` builds the stand-in and says where it lies.

``--if-possible`` is content where there is no compiler, unless ``DISTSESSION_STANDIN=required``.
"""

import os
import sys

from tests.standin.build import CannotBuildError, build, why_not


def main(arguments: list[str]) -> str | None:
    optional = "--if-possible" in arguments and os.environ.get("DISTSESSION_STANDIN") != "required"
    if optional and (reason := why_not()):
        print(f"no stand-in: {reason}")
        return None
    try:
        print(build())
    except CannotBuildError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
