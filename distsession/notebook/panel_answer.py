"""What has come of a button of the panel: with its time, until somebody closes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

from distsession.display import panel
from distsession.display.html import Html, element

__all__ = ["Answer"]


class Answer:
    """A place below the buttons, empty at first.

    Args:
        run: Does what was asked for, beside the main thread.
    """

    def __init__(self, run: Callable[[Callable[[], Html]], None]):
        import ipywidgets

        self._run = run
        self._content: tuple[Html, str, bool] | None = None
        self._outdated = ""
        self._ages = False
        self._state: Hashable = None
        self._action: Callable[[], Html] | None = None
        self.html = ipywidgets.HTML()
        auto = {"width": "auto"}
        self._confirm = ipywidgets.Button(button_style="danger", layout={**auto, "display": "none"})
        self._close = ipywidgets.Button(
            description="Close", tooltip="Take this away", layout={**auto, "display": "none"}
        )
        self._confirm.on_click(lambda _: self._confirmed())
        self._close.on_click(lambda _: self.clear())
        self.widget = ipywidgets.VBox([self.html, ipywidgets.HBox([self._confirm, self._close])])

    @property
    def controls(self) -> tuple[Any, ...]:
        """What can be clicked."""
        return self._confirm, self._close

    def show(self, name: str, content: Html, *, is_error: bool = False, ages: bool = False) -> None:
        """Show something in place of what was here.

        Args:
            name: Of the button.
            content: What has come of it.
            is_error: It failed.
            ages: It is true only until the ranks do something else.
        """
        title = f"{name}, {time.strftime('%H:%M:%S')}"
        self._ages, self._state, self._outdated = ages, None, ""
        self._set_action(None)
        self._set((content, title, is_error))

    def ask(self, name: str, question: str, label: str, action: Callable[[], Html]) -> None:
        """Have somebody confirm what cannot be undone.

        Args:
            name: Of the button.
            question: What is asked.
            label: Of the button that confirms it.
            action: What that does.
        """
        self.show(name, element("p", question))
        self._confirm.description = label
        self._set_action(action)

    def check(self, state: Hashable) -> None:
        """Grey out what is true no longer.

        Args:
            state: What the ranks do.
        """
        if not self._ages or self._outdated or self._content is None:
            return
        if self._state is None:
            self._state = state
        elif self._state != state:
            self._outdated = time.strftime("%H:%M:%S")
            self._set(self._content)

    def clear(self) -> None:
        """Show nothing."""
        self._set_action(None)
        self._set(None)

    # --- inside -----------------------------------------------------------------------------------

    def _set(self, content: tuple[Html, str, bool] | None) -> None:
        self._content = content
        shown = ""
        if content is not None:
            body, title, is_error = content
            shown = panel.answer_html(body, title=title, is_error=is_error, outdated=self._outdated)
        if self.html.value != shown:
            self.html.value = shown
        self._close.layout.display = "none" if content is None else ""

    def _set_action(self, action: Callable[[], Html] | None) -> None:
        self._action = action
        self._confirm.layout.display = "none" if action is None else ""

    def _confirmed(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            self._run(action)
