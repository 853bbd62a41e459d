"""From the calls of a notebook's functions to plain Python."""

from __future__ import annotations

from distsession.export.history import Call
from distsession.export.needs import resolved
from distsession.export.translate import Plain, indented

__all__ = ["call_to_python"]


def call_to_python(call: Call, number: int) -> Plain:
    """A function around what the notebook had: its names do not mix with those of the ranks.

    Names that the notebook does not have are the script's, as they are the ranks' in a session.
    """
    plain = Plain("")
    lines: list[str] = []
    needs = resolved(call.needs)
    title = next(iter(needs))
    sources: list[str] = []
    for each in needs.values():
        if each.problem:
            plain.problems.append(f"it cannot be written, since {each.problem}")
        elif each.source:
            sources.append(each.source)
        else:
            lines += each.text.split("\n")
    both = [name for each in needs.values() for name in sorted(each.stores) if name in needs]
    if both:
        plain.problems.append(f"it stores the global {both[0]}, which the notebook has, too")
    begin = f"_call_{number}"
    body = "\n".join([*lines, *reversed(sources), f"{title}({call.arguments})"])
    if plain.problems:
        return plain
    plain.code = f"def {begin}():\n{indented(body)}\n\n\n"
    if call.times > 1:
        plain.code += f"for _ in range({call.times}):\n    {begin}()"
    else:
        plain.code += f"{begin}()"
    return plain
