"""What is said of hosts that do not fit together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distsession.protocol.host_checks import HostProblem, check_hosts, choose_addresses
from distsession.protocol.host_facts import HostFacts, facts_of

PACKAGES = {"distsession": "0.1.0", "torch": "2.13.0+cpu", "pyzmq": "27.3.0", "numpy": "2.0"}
HERE = HostFacts(
    name="here",
    hostname="login",
    resolves_to=("10.0.0.9",),
    addresses={"eth0": "10.0.0.9"},
    python="3.11.7",
    executable="/opt/python",
    packages=PACKAGES,
)
ONE = replace(
    HERE,
    name="gpu1",
    hostname="gpu1",
    resolves_to=("10.0.0.1",),
    addresses={"docker0": "172.17.0.1", "eth0": "10.0.0.1"},
    torch="2.13.0+cpu",
    backends=("gloo", "nccl"),
    port=4000,
)
TWO = replace(
    ONE,
    name="gpu2",
    hostname="gpu2",
    resolves_to=("10.0.0.2",),
    addresses={"docker0": "172.17.0.1", "eth0": "10.0.0.2"},
)
OTHER = "something else answers there"
REACH = {
    "gpu1": {"gpu2": {"172.17.0.1": OTHER, "10.0.0.2": ""}},
    "gpu2": {"gpu1": {"172.17.0.1": OTHER, "10.0.0.1": ""}},
}


def problems(
    *hosts: HostFacts, offsets: dict[str, float] | None = None, reach: Any = None
) -> list[HostProblem]:
    return list(check_hosts(HERE, hosts, offsets or {}, REACH if reach is None else reach))


def test_hosts_that_fit_have_no_problem() -> None:
    assert problems(ONE, TWO) == []


def test_a_bridge_for_containers_is_not_taken_for_a_way_to_a_host() -> None:
    assert choose_addresses([ONE, TWO], REACH) == {
        "gpu1": ("eth0", "10.0.0.1"),
        "gpu2": ("eth0", "10.0.0.2"),
    }
    assert choose_addresses([ONE], {}) == {}


@pytest.mark.parametrize(
    ("changes", "says", "mend", "fatal"),
    [
        ({"python": "3.12.1"}, "Python 3.12.1 (/opt/python), and 3.11.7 here", "--python", True),
        (
            {"packages": {**PACKAGES, "torch": "2.12.0"}},
            "torch 2.12.0, and 2.13.0+cpu here",
            "/opt/python -m pip install 'torch==2.13.0+cpu'",
            True,
        ),
        ({"packages": {**PACKAGES, "distsession": "0.2"}}, "distsession 0.2,", "pip install", True),
        ({"packages": {**PACKAGES, "numpy": "1.26"}}, "numpy 1.26, and 2.0 here", "pip", False),
        ({"packages": {**PACKAGES, "pyzmq": None}}, "pyzmq is missing, and 27", "pip", True),
        ({"problem": "torch cannot be imported: x"}, "torch cannot be", "import torch", True),
        ({"resolves_to": ("127.0.1.1",)}, "resolves to 127.0.1.1", "GLOO_SOCKET_IFNAME", False),
        ({"resolves_to": ()}, "gpu2, resolves to nothing", "/etc/hosts", False),
        (
            {"resolves_to": (), "is_name_unanswered": True},
            "gpu2, is not found there, for no name server answers",
            "/etc/hosts",
            False,
        ),
        ({"sees_folder": False}, "folder is not shared", "--folder", False),
        ({"has_directory": False}, "the directory that you are in", "all hosts share", False),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_differs_is_named_with_its_remedy(
    changes: dict[str, Any], says: str, mend: str, fatal: bool
) -> None:
    (problem,) = problems(ONE, replace(TWO, **changes))
    assert problem.what == "gpu2"
    assert says in problem.value
    assert mend in problem.mend
    assert problem.fatal is fatal


def test_a_patch_release_of_python_may_differ() -> None:
    assert problems(replace(ONE, python="3.11.9"), TWO) == []


@pytest.mark.parametrize(
    ("changes", "what", "says"),
    [
        ({"torch": "2.13.0+cu130"}, "torch's build", "2.13.0+cpu on gpu1; 2.13.0+cu130 on gpu2"),
        ({"backends": ("gloo",)}, "backends", "gloo, nccl on gpu1; gloo on gpu2"),
        ({"nccl": "2.28.9"}, "NCCL", "none on gpu1; 2.28.9 on gpu2"),
    ],
)
def test_builds_are_compared_between_the_hosts(
    changes: dict[str, Any], what: str, says: str
) -> None:
    (problem,) = problems(ONE, replace(TWO, **changes))
    assert (problem.what, problem.value, problem.fatal) == (what, says, True)


@pytest.mark.parametrize(("offset", "says"), [(2.5, "2.5 s ahead of"), (-3600, "3,600.0 s behind")])
def test_a_clock_that_is_off_is_named(offset: float, says: str) -> None:
    (problem,) = problems(ONE, TWO, offsets={"gpu1": 0.4, "gpu2": offset})
    assert problem.what == "gpu2"
    assert says in problem.value
    assert "timedatectl" in problem.mend
    assert not problem.fatal


def test_two_agents_on_one_host_are_named() -> None:
    (problem,) = problems(ONE, ONE, reach={})
    assert problem.value == "2 agents are on a host of this name"
    assert "ppr:1:node" in problem.mend


def test_a_host_that_another_does_not_reach_is_named_in_that_direction() -> None:
    tried = {"172.17.0.1": OTHER, "10.0.0.2": "no answer in 3 s"}
    (problem,) = problems(ONE, TWO, reach={**REACH, "gpu1": {"gpu2": tried}})
    assert problem.what == "gpu1 -> gpu2"
    assert "10.0.0.2: no answer in 3 s" in problem.value
    assert choose_addresses([ONE, TWO], {**REACH, "gpu1": {"gpu2": tried}}) == {
        "gpu1": ("eth0", "10.0.0.1")
    }


def test_an_address_that_only_some_reach_is_not_chosen() -> None:
    three = {"gpu1": {"172.17.0.1": "", "10.0.0.1": ""}}
    ways = {**REACH, "gpu3": three}
    assert choose_addresses([ONE], ways) == {"gpu1": ("eth0", "10.0.0.1")}
    assert choose_addresses([ONE], {"gpu3": three}) == {"gpu1": ("docker0", "172.17.0.1")}


def test_facts_come_as_they_were_sent_and_what_is_new_is_left_out() -> None:
    body = {name: getattr(ONE, name) for name in ONE.__dataclass_fields__}
    assert facts_of({**body, "backends": ["gloo", "nccl"], "of_tomorrow": 1}) == ONE


@pytest.mark.parametrize("body", [{}, {"name": "x"}])
def test_facts_that_lack_something_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no facts of a host"):
        facts_of(body)
