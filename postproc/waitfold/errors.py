"""What waitfold says when it cannot go on.

A message says what happened, why, and what to do next.
"""


class WaitfoldError(Exception):
    """Something could not be done; the command line prints the message and exits with 1."""


class Misuse(WaitfoldError):  # noqa: N818
    """The command was called wrongly; the command line exits with 2."""


class PerfDataError(WaitfoldError):
    """A perf.data file cannot be read: not one, damaged, or of a kind that is refused."""
