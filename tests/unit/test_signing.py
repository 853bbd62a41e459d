"""Messages to ipyparallel's controller are not signed, for CurveZMQ stands in for it."""

from __future__ import annotations

import logging

from traitlets.log import get_logger

from distsession.cluster.ipyparallel import _message_session

FACTS = {"key": "", "signature_scheme": "hmac-sha256", "pack": "json", "unpack": "json"}


def test_nobody_is_warned_of_that() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = get_logger()
    logger.addHandler(handler)
    try:
        _message_session(FACTS)
        logger.warning("another warning")
    finally:
        logger.removeHandler(handler)
    assert said == ["another warning"]
