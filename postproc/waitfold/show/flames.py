"""Flame graphs as the script of a report's page draws them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from waitfold.show import fold, text
from waitfold.show.markup import paragraph, visible

NODES_MAX = 12_000
"""At most so many frames of a flame graph, the greatest."""

_NAME_MAX = 300  # characters of a frame

_WARM = ((232, 92, 60), (252, 186, 90))
_COOL = ((126, 146, 232), (170, 190, 255))


class Graphs:
    """Flame graphs as the script draws them; the names of all frames are in one table."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._graphs: dict[str, Any] = {}

    def add(self, key: str, stacks: str, paint: dict[str, str], warm: bool) -> list[str]:
        """Take the graph of folded stacks; return what is to be said of what it leaves out."""
        names, depths, values = _tree(stacks)
        floor = 0
        if len(values) > NODES_MAX:
            floor = int(np.partition(values, len(values) - NODES_MAX)[-NODES_MAX])
        kept = values >= max(floor, 1)
        if kept.sum() > NODES_MAX:  # many are as great as the least of them
            kept = values > floor
        of = [name for name, keep in zip(names, kept.tolist(), strict=True) if keep]
        self._graphs[key] = {
            "names": [self._names.setdefault(name, len(self._names)) for name in of],
            "depths": depths[kept].tolist(),
            "values": values[kept].tolist(),
            "colours": {
                self._names[name]: paint.get(name) or _shade(name, _WARM if warm else _COOL)
                for name in dict.fromkeys(of)
            },
        }
        left = len(values) - len(of)
        return paragraph(
            f"{left} frames of at most {text.human(floor)} each are not drawn." if left else ""
        )

    def data(self) -> str:
        """Return all as JSON that can stand in a script element."""
        names = [visible(name[:_NAME_MAX]) for name in self._names]
        data = json.dumps({"names": names, "graphs": self._graphs}, separators=(",", ":"))
        # All else that HTML or a script could take for its own is escaped by JSON, as not ASCII.
        for c in "<>&":
            data = data.replace(c, f"\\u{ord(c):04x}")
        return data


def _tree(stacks: str) -> tuple[list[str], Any, Any]:
    """Return the frames of folded stacks, each before those that stand on it: depth and time."""
    names: list[str] = []
    depths: list[int] = []
    values: list[int] = []
    above: list[int] = []  # the frames of the stack before
    path: list[str] = []
    for stack, ns in sorted(fold.parsed(stacks)):
        same = 0
        for one, other in zip(stack, path, strict=False):
            if one != other:
                break
            same += 1
        del above[same:]
        for depth in range(same, len(stack)):
            above.append(len(names))
            names.append(stack[depth])
            depths.append(depth)
            values.append(0)
        for i in above:
            values[i] += ns
        path = stack
    return names, np.array(depths, np.int32), np.array(values, np.int64)


def _shade(name: str, ends: Sequence[Sequence[int]]) -> str:
    part = zlib.crc32(name.encode(errors="replace")) / 2**32
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(*ends, strict=True))
    return f"rgb({red},{green},{blue})"
