"""waitfold: PostgreSQL wait events from perf, as intervals, tables and flame graphs."""

from importlib.metadata import version

__version__ = version("waitfold")
