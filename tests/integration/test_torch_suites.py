"""Some of torch's own tests on ranks, and in plain processes; ``make soak`` runs all of them."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy", reason="torch's tests need it")

from tests.torch_suites import suites
from tests.torch_suites.__main__ import compare
from tests.torch_suites.exceptions import EXCEPTIONS
from tests.torch_suites.outcome import Verdict, exit_code, summary

pytestmark = pytest.mark.timeout(180)

SOME = {
    "distributed": (
        "test_Backend_enum_class",
        "test_all_reduce_coalesced_sum",
        "test_all_to_all_single_unequal_split",
        "test_ddp_uneven_inputs_stop_iteration_sync_bn",
        "test_monitored_barrier_allreduce_hang",
        "test_new_subgroups",
    ),
    "common": ("test_a_reducer_that_is_made_directly", "test_dtypes_that_gloo_does_not_add"),
    "backend": ("test_it_times_out", "test_receiving_from_anyone"),
    "store": ("test_queues", "test_a_server_that_goes_away"),
    "rpc": ("test_add_with_id", "test_py_raise_in_user_func"),
}


@pytest.mark.parametrize("suite", SOME)
def test_what_passes_in_plain_processes_passes_on_ranks(suite: str) -> None:
    chosen = next(s for s in suites.SUITES if s.name == suite)
    results = list(compare(chosen, SOME[suite]))

    assert exit_code(results, EXCEPTIONS) == 0, summary(results, EXCEPTIONS)
    verdicts = {result.method: result.verdict(EXCEPTIONS) for result in results}
    assert verdicts == dict.fromkeys(SOME[suite], Verdict.PASSED)
