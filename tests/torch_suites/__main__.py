"""Run the suites; see the package."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.torch_suites import suites
from tests.torch_suites.worlds import Plain, Ranks

LIMIT_S = 60.0
LONG = {"test_ddp_uneven_inputs": 300.0}


def compare(suite: suites.Suite, only: str, out: Path | None, skip_plain: bool) -> None:
    names = [name for name in suites.methods(suite) if only in name]
    if not names:
        return
    ranks, plain = Ranks(suite), Plain(suite)
    try:
        for name in names:
            limit = LONG.get(name, LIMIT_S)
            theirs = plain.run(name, limit)
            if theirs.status == "skipped":
                print(f"{suite.name}.{name}: skipped {theirs.texts}", flush=True)
                continue
            mine = ranks.run(name, limit)
            word = "ok" if mine.passed else f"{mine.status} {mine.unusable}"
            print(
                f"{suite.name}.{name}: plain {theirs.status} {theirs.seconds:.1f} s, "
                f"here {word} {mine.seconds:.1f} s",
                flush=True,
            )
            if mine.passed == theirs.passed and not mine.unusable:
                continue
            used = mine
            ranks.renew()
            mine = ranks.run(name, limit)
            print(f"   anew: {mine.status} {mine.unusable}", flush=True)
            if not mine.passed:
                ranks.renew()
            if out:
                with out.open("a") as file:
                    json.dump(
                        {
                            "suite": suite.name,
                            "method": name,
                            "plain": vars(theirs),
                            "used": vars(used),
                            "anew": vars(mine),
                        },
                        file,
                    )
                    file.write("\n")
    finally:
        ranks.close()
        plain.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", action="append", default=[])
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    began = time.monotonic()
    for suite in suites.SUITES:
        if not a.suite or suite.name in a.suite:
            compare(suite, a.only, a.out, False)
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
