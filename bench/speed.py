#!/usr/bin/env python3
"""Print what bench/pair.awk prints, by waitfold's reader: VALUE COUNT TOTAL_NS a line."""

from __future__ import annotations

import sys

from waitfold.events import PairRule, transitions
from waitfold.pair import pair
from waitfold.perfdata import PerfData
from waitfold.summary import Summary

data = PerfData(sys.argv[1])
event = sys.argv[2]
summary = Summary()
for batch in pair(transitions([data], PairRule(event, "v", event, 0))):
    summary.add(batch)
for stats in summary.values():
    print(f"{stats.value:#x} {stats.count} {stats.total_ns}")
