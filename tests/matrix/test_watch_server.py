"""Xids and oids of every server in WAITFOLD_SERVERS, a folder with one sub-folder a version."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import PG_BIN, running_cluster
from test_watch import check_oids, check_wrap, check_xids

SERVERS = [PG_BIN]
if "WAITFOLD_SERVERS" in os.environ:
    SERVERS += sorted(Path(os.environ["WAITFOLD_SERVERS"]).glob("*/bin"))


@pytest.mark.parametrize("binaries", SERVERS, ids=lambda path: path.parent.name)
def test_watch(binaries: Path) -> None:
    """101 xids, 53 oids, and both counters when they wrap around."""
    with running_cluster(binaries=binaries) as own:
        check_xids(own)
        check_oids(own)
        check_wrap(own)
