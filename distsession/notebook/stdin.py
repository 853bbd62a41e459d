"""The box in which somebody answers what a rank asks."""

from __future__ import annotations

import getpass

__all__ = ["read_input"]


def read_input(prompt: str, secret: bool = False) -> str:
    """A line of input: from the notebook's box, a terminal, or standard input.

    Jupyter replaces both functions by such as open a box. Its own exception where there is none is
    a ``NotImplementedError``.

    Raises:
        EOFError: The input is at its end.
        NotImplementedError: The front end takes no input.
    """
    return getpass.getpass(prompt) if secret else input(prompt)
