"""Colours of what a process does, the same in all views, on a light and on a dark ground."""

from __future__ import annotations

from dataclasses import dataclass

ON_CPU, RUN_QUEUE, NO_EVENT, NOT_WAITING, IDLE, UNSEEN, OTHER = (
    "on-CPU",
    "run queue",
    "off-CPU without a wait event",
    "not waiting",
    "idle",
    "not seen",
    "other waits",
)


@dataclass(frozen=True)
class Colour:
    """One colour, as it is on a light and on a dark ground."""

    light: str
    dark: str


GROUND, INK, FAINT = (
    Colour("#FFFFFF", "#161616"),
    Colour("#222222", "#F2F2F2"),
    Colour("#DDDDDD", "#3A3A3A"),
)

# Any two differ by more than 0.1 in OKLab, the ground included, also as seen with protanopia,
# deuteranopia and tritanopia (matrices of Machado, Oliveira and Fernandes, 2009).
COLOURS = {
    ON_CPU: Colour("#839B73", "#839B73"),
    RUN_QUEUE: Colour("#FFC619", "#FFC619"),
    "Lock": Colour("#C53B06", "#C53B06"),
    "LWLock": Colour("#BBA900", "#BBA900"),
    "IO": Colour("#1368E7", "#1368E7"),
    "IPC": Colour("#BE5CAA", "#BE5CAA"),
    "Client": Colour("#5B9EFF", "#5B9EFF"),
    "Timeout": Colour("#762BAA", "#762BAA"),
    OTHER: Colour("#5F0073", "#5F0073"),
    NO_EVENT: INK,
    NOT_WAITING: Colour("#A1C3A0", "#046469"),
    IDLE: Colour("#DBDBDB", "#2F2F2F"),
}
"""By class of wait events and what else a process does; a class that is missing has OTHER's."""

HEAT = tuple(
    Colour(light, dark)
    for light, dark in (
        ("#F7E2B8", "#4F253A"),
        ("#EFBD7F", "#783044"),
        ("#E8934C", "#A23D43"),
        ("#DF6322", "#CB4F30"),
        ("#C63A28", "#E5711B"),
        ("#9E2137", "#EF9B3D"),
        ("#760C38", "#F6C369"),
        ("#4F0031", "#FDE89A"),
    )
)
"""From little to much, in even steps of lightness."""
