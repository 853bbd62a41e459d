"""Messages to ipyparallel's controller are not signed: CurveZMQ stands in for signatures."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["no_signing_warning"]


@contextlib.contextmanager
def no_signing_warning() -> Iterator[None]:
    """Let jupyter_client not warn of their absence.

    It does so by the log of the application that runs, which in a notebook is the kernel.
    """
    from traitlets.log import get_logger

    logger = get_logger()
    logger.addFilter(_is_other)
    try:
        yield
    finally:
        logger.removeFilter(_is_other)


def _is_other(record: logging.LogRecord) -> bool:
    return "signing is disabled" not in record.getMessage()
