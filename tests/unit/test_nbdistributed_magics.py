"""Names that users of nbdistributed type."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.error import UsageError

from distsession.notebook import nbdistributed_magics


@pytest.fixture
def magics() -> dict[str, dict[str, Any]]:
    return {"line": {"sync": len}, "cell": {}}


@pytest.fixture
def shell(magics: dict[str, dict[str, Any]]) -> Any:
    return SimpleNamespace(magics_manager=SimpleNamespace(magics=magics))


@pytest.mark.parametrize(
    ("kind", "name", "line", "ours"),
    [
        ("cell", "rank", "[0, 1]", "%%distributed 0,1"),
        ("cell", "rank", "", "%%distributed"),
        ("line", "dist_status", "", "%session, or %session devices"),
        ("line", "dist_init", "-n 4", "%session start 4"),
        ("line", "dist_shutdown", "", "%session close"),
    ],
)
def test_they_say_what_is_here(
    shell: Any, magics: dict[str, dict[str, Any]], kind: str, name: str, line: str, ours: str
) -> None:
    nbdistributed_magics.register(shell)
    arguments = (line, "x = 1") if kind == "cell" else (line,)
    with pytest.raises(UsageError) as raised:
        magics[kind][name](*arguments)
    assert str(raised.value).endswith(f"Here it is: {ours}")


def test_a_magic_that_is_there_stays(shell: Any, magics: dict[str, dict[str, Any]]) -> None:
    nbdistributed_magics.register(shell)
    assert magics["line"]["sync"] is len
    nbdistributed_magics.unregister(shell)
    assert magics == {"line": {"sync": len}, "cell": {}}
