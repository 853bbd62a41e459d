"""Run the suites; see the package."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

from tests.torch_suites import suites
from tests.torch_suites.exceptions import EXCEPTIONS
from tests.torch_suites.outcome import Result, Verdict, exit_code, summary
from tests.torch_suites.worlds import Plain, Ranks

LIMIT_S = 60.0
LONG = {"test_ddp_uneven_inputs": 300.0}


def compare(chosen: Iterable[tuple[suites.Suite, Iterable[str]]]) -> Iterator[Result]:
    """Run methods one after another, in plain processes and on ranks.

    Suites that take the same number of ranks and come after one another share a session.
    """
    for count, alike in groupby(chosen, key=lambda pair: pair[0].ranks):
        with ExitStack() as stack:
            plain = stack.enter_context(closing(Plain()))
            ranks = stack.enter_context(closing(Ranks(count)))
            for suite, methods in alike:
                for method in methods:
                    yield _result(suite, method, plain, ranks)


def _result(suite: suites.Suite, method: str, plain: Plain, ranks: Ranks) -> Result:
    theirs = plain.run(suite, method, limit(method))
    result = Result(suite.name, method, theirs, is_ours=suite.is_ours)
    if theirs.status == "skipped":
        return result
    here = ranks.run(suite, method, limit(method))
    result = replace(result, here=here)
    if result.verdict({}) is not Verdict.FAULT and not here.unusable:
        return result
    ranks.renew()
    result = replace(result, anew=ranks.run(suite, method, limit(method)))
    ranks.renew()
    return result


def limit(method: str) -> float:
    return LONG.get(method, LIMIT_S)


def chosen(names: list[str], matches: Callable[[str], bool]) -> Iterator[tuple[suites.Suite, list]]:
    for suite in suites.SUITES:
        if not names or suite.name in names:
            methods = [method for method in suites.methods(suite) if matches(method)]
            if methods:
                yield suite, methods


def line(result: Result) -> str:
    verdict = result.verdict(EXCEPTIONS)
    if result.here is None:
        said = next(iter(result.plain.texts.values()), "")
        return f"{result.name}: skipped, {said}"
    return (
        f"{result.name}: {'ok' if verdict is Verdict.PASSED else verdict.name}, "
        f"plain {result.plain.status} {result.plain.seconds:.1f} s, "
        f"here {result.here.status} {result.here.seconds:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [suite.name for suite in suites.SUITES]
    parser.add_argument("--suite", action="append", default=[], choices=names)
    parser.add_argument("--only", default="", help="part of methods' names")
    parser.add_argument("--list", action="store_true", help="show their names and run nothing")
    parser.add_argument("--out", type=Path, help="a file for all outcomes, a JSON object a line")
    asked = parser.parse_args()

    began, results = time.monotonic(), []
    pairs = list(chosen(asked.suite, lambda method: asked.only in method))
    if asked.list:
        print(
            *(f"{suite.name}.{method}" for suite, methods in pairs for method in methods), sep="\n"
        )
        return 0
    for result in compare(pairs):
        results.append(result)
        print(line(result), flush=True)
        if asked.out:
            with asked.out.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    print(summary(results, EXCEPTIONS))
    print(f"{time.monotonic() - began:.0f} s")
    return exit_code(results, EXCEPTIONS)


if __name__ == "__main__":
    sys.exit(main())
