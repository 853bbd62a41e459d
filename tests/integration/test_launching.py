"""Starting ranks for one function, on one host and on what passes for two."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

import distsession
from distsession import (
    LaunchOptions,
    OptionsError,
    RunError,
    SessionStateError,
    launch,
    start_training,
)
from tests.conftest import assert_nothing_left, traces

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

pytestmark = pytest.mark.usefixtures("_quiet")


@pytest.fixture(autouse=True)
def _nothing_left_after_each_test():
    before = traces()
    yield
    assert_nothing_left(before)


@pytest.fixture
def _quiet(monkeypatch):
    from distsession import session
    from distsession.view import Silent

    monkeypatch.setattr(session, "output_factory", lambda log: Silent())


def total(start: float, *, more: float = 0.0) -> float:
    value = torch.tensor(start + more + dist.get_rank())
    dist.all_reduce(value)
    return value.item()


def test_a_function_runs_on_all_ranks_and_gives_their_results():
    results = launch(total, 1.0, nproc_per_node=3, more=0.5)

    assert dict(results) == {0: 7.5, 1: 7.5, 2: 7.5}
    with pytest.raises(SessionStateError):
        distsession.current_session()


def placed(local_rank: int, start: float, *, more: float = 0.0) -> tuple[int, float]:
    return local_rank, total(start, more=more)


def test_lambdas_and_closures_run():
    factor = 10

    results = launch(lambda: (factor + dist.get_rank(), os.getpid()), nproc_per_node=1)

    assert results.ranks == (0,)
    assert results[0][0] == 10
    assert results[0][1] != os.getpid()


def test_a_first_parameter_gets_the_local_rank_by_its_name():
    results = launch(placed, 1.0, nproc_per_node=2, more=0.5)
    here = start_training(
        lambda local_rank, x: (local_rank, x), LaunchOptions(distributed=False), 1
    )
    default = start_training(lambda local_rank=7: local_rank, LaunchOptions(distributed=False))
    given = start_training(
        lambda local_rank: local_rank, LaunchOptions(distributed=False), local_rank=8
    )

    assert dict(results) == {0: (0, 4.0), 1: (1, 4.0)}
    assert [dict(each) for each in (here, default, given)] == [{0: (0, 1)}, {0: 7}, {0: 8}]


def test_an_error_comes_through_and_nothing_stays():
    last = torch.cuda.device_count() - 1 if torch.cuda.is_available() else 1
    with pytest.raises(RunError, match=f"ZeroDivisionError on rank(s 0-{last}| 0)"):
        launch(lambda: 1 / 0)


@pytest.mark.parametrize(
    "options", [{"nproc_per_node": 0}, {"backend": "none"}, {"nnodes": 0}, {"nnodes": True}]
)
def test_an_option_that_cannot_work_is_named(options):
    with pytest.raises(OptionsError, match=f"^{next(iter(options))}|none"):
        launch(total, 1.0, **{"nproc_per_node": 2, **options})


def test_training_starts_as_the_options_say():
    options = LaunchOptions(processes=2, backend="gloo")

    assert dict(start_training(placed, options, 1.0, more=1.0)) == {0: (0, 5.0), 1: (1, 5.0)}


def test_training_takes_its_options_from_the_environment(monkeypatch):
    monkeypatch.setenv("DISTSESSION_LAUNCH_PROCESSES", "3")

    assert dict(start_training(total, None, 0.0)) == {0: 3.0, 1: 3.0, 2: 3.0}


def test_training_without_distribution_runs_here():
    results = start_training(os.getpid, LaunchOptions(distributed=False))

    assert dict(results) == {0: os.getpid()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_training_with_nccl_needs_a_gpu():
    with pytest.raises(OptionsError, match=r"nccl.*needs a GPU"):
        start_training(total, LaunchOptions(processes=2, backend="nccl"), 1.0)


def test_the_ranks_of_two_hosts_form_one_group(tmp_path, port):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            import torch.distributed as dist
            from distsession import LaunchOptions, start_training

            def train(power):
                found = [None] * dist.get_world_size()
                dist.all_gather_object(found, dist.get_rank() ** power)
                pair = dist.new_group([1, 2])
                value = [rank]
                if rank in (1, 2):
                    dist.broadcast_object_list(value, src=2, group=pair)
                return found, value[0], world_size, os.environ["RANK"], os.environ["LOCAL_RANK"]

            if __name__ == "__main__":
                for rank, value in start_training(train, LaunchOptions.from_arguments(), 2).items():
                    print(rank, value)
            """
        )
    )
    common = ["--world-size", "4", "--processes", "2", "--port", str(port)]
    hosts = [
        subprocess.Popen(
            [sys.executable, str(script), *common, "--first-rank", first],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # where a slow start says what it waits for
            text=True,
            env={**os.environ, "PYTHONPATH": ROOT},
        )
        for first in ("0", "2")
    ]
    try:
        said = [host.communicate(timeout=90) for host in hosts]
    finally:
        for host in hosts:
            host.kill()

    assert [host.returncode for host in hosts] == [0, 0], said
    texts = [out for out, _ in said]
    assert texts[0].splitlines() == [
        "0 ([0, 1, 4, 9], 0, 4, '0', '0')",
        "1 ([0, 1, 4, 9], 2, 4, '1', '1')",
    ]
    assert texts[1].splitlines() == [
        "2 ([0, 1, 4, 9], 2, 4, '2', '0')",
        "3 ([0, 1, 4, 9], 3, 4, '3', '1')",
    ]
