"""Some of torch's own tests on ranks, and in plain processes; ``make soak`` runs all of them."""

from __future__ import annotations

import importlib.util

import pytest

from tests.torch_suites import suites
from tests.torch_suites.__main__ import compare
from tests.torch_suites.exceptions import EXCEPTIONS
from tests.torch_suites.outcome import Verdict, exit_code, summary

MISSING = [name for name in ("expecttest", "numpy") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(MISSING), reason=f"torch's tests need {MISSING}"),
]

SOME = {
    "distributed": (
        "test_all_to_all_single_unequal_split",
        "test_ddp_logging_data_cpu",
        "test_monitored_barrier_gloo_rank_0_timeout",
    ),
    "common": (
        "test_a_reducer_that_is_made_directly",
        "test_dtypes_that_gloo_does_not_add",
        "test_functions_with_gradients",
        "test_uneven_inputs",
        "test_what_all_to_all_refuses",
        "test_what_new_group_refuses",
    ),
    "backend": ("test_it_times_out", "test_receiving_from_anyone"),
    "store": ("test_a_server_that_goes_away", "test_queues"),
    "remote_module": ("test_forward_async",),
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_passes_in_plain_processes_passes_on_ranks(ranks: int) -> None:
    alike = [suite for suite in suites.SUITES if suite.name in SOME and suite.ranks == ranks]
    results = list(compare([(suite, SOME[suite.name]) for suite in alike]))

    assert exit_code(results, EXCEPTIONS) == 0, summary(results, EXCEPTIONS)
    assert {result.verdict(EXCEPTIONS) for result in results} == {Verdict.PASSED}
    assert len(results) == sum(len(SOME[suite.name]) for suite in alike)
