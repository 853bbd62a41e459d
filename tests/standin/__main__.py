"""``python -m tests.standin`` builds the stand-in and says where it lies."""

import sys

from tests.standin.build import CannotBuildError, build

if __name__ == "__main__":
    try:
        print(build())
    except CannotBuildError as error:
        sys.exit(str(error))
