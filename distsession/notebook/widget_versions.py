"""What differs between releases of ipywidgets and of ipykernel.

Hosted notebooks have ipywidgets 7, and an ipykernel that does not know the ``comm`` package: both
then make their comms by ``ipykernel.comm``, and the kernel knows of no others.
"""

from __future__ import annotations

from typing import Any

import comm
import ipykernel.comm
import ipywidgets
from ipykernel.kernelbase import Kernel
from ipywidgets.widgets import widget as _widget

from distsession.display.widgets import WIDGET_VIEW

__all__ = ["comm_manager", "html_style", "instances", "make_comm", "publish", "view"]

HAS_COMM_PACKAGE = (6, 18)
"""The first ipykernel that makes its comms by the ``comm`` package."""


def comm_manager() -> Any:
    """Knows the comms of this kernel."""
    kernel = _old_kernel()
    return comm.get_comm_manager() if kernel is None else kernel.comm_manager


def make_comm(comm_id: str, target_name: str) -> Any:
    """A comm that has told the page nothing yet."""
    make = comm.create_comm if _old_kernel() is None else ipykernel.comm.Comm
    return make(comm_id=comm_id, target_name=target_name, primary=False)


def publish(made: Any, kind: str, **content: Any) -> None:
    """Send the page a message of a comm."""
    if hasattr(made, "publish_msg"):
        made.publish_msg(kind, **content)
    else:
        made._publish_msg(kind, **content)


def instances() -> Any:
    """All widgets of this process, by their numbers."""
    found = getattr(_widget, "_instances", None)
    return ipywidgets.Widget.widgets if found is None else found


def html_style() -> Any:
    """A style that several ``HTML`` widgets can share."""
    return ipywidgets.HTML.class_traits()["style"].klass()


def view(widget: Any) -> dict[str, Any]:
    """What a front end needs to show a widget."""
    return {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}


def _old_kernel() -> Any:
    """This kernel, if the ``comm`` package means nothing to it."""
    is_old = ipykernel.version_info[:2] < HAS_COMM_PACKAGE
    return Kernel.instance() if is_old and Kernel.initialized() else None
