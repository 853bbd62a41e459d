"""``python -m tests.standin`` builds the stand-in and says where it lies.

``--if-possible`` is content where tests with it are skipped.
"""

import sys

from tests.standin import required_or_reason
from tests.standin.build import CannotBuildError, build


def main(arguments: list[str]) -> str | None:
    if "--if-possible" in arguments and (reason := required_or_reason()):
        print(f"no stand-in: {reason}")
        return None
    try:
        print(build())
    except CannotBuildError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
