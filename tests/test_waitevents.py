"""wait_event_info as class and name."""

import numpy as np
import pytest

from waitfold.errors import WaitfoldError
from waitfold.waitevents import CLIENT_READ, WaitEvents, is_idle, is_idle_wait


@pytest.mark.parametrize(
    ("version", "value", "label"),
    [
        ("15.18", 0x0A000011, ("IO", "DataFileRead")),
        ("18.6", 0x0A000015, ("IO", "DataFileRead")),
        ("17", 0x01000008, ("LWLock", "WALWrite")),
        ("17.3", 0x01000008, ("LWLock", "WALWrite")),
        ("17.2", 0x01000008, ("LWLock", "WALWriteLock")),
        ("10.14", 0x0100002E, ("LWLock", "clog")),
        ("10.23", 0x0100002E, ("LWLock", "WrapLimitsVacuumLock")),
        ("12.22", 0x03000004, ("Lock", "transactionid")),
        ("13.23", 0x03000005, ("Lock", "transactionid")),
        ("13.23", 0x0A00000D, ("IO", "DataFileRead")),
        ("15.2", 0x01000031, ("LWLock", "CommitTSBuffer")),
        ("15.3", 0x01000031, ("LWLock", "CommitTsBuffer")),
        ("18.4", 0x08000039, ("?", "0x08000039")),
        ("18.5", 0x08000039, ("IPC", "WalReceiverUpstreamCatchup")),
        ("18", 0x0100005E, ("LWLock", "AioUringCompletion")),
        ("18", 0x0100005F, ("LWLock", "extension")),
        ("18", 0x0100FFFF, ("LWLock", "extension")),
        ("16.1", 0x07000000, ("Extension", "Extension")),
        ("16.1", 0x07000001, ("?", "0x07000001")),
        ("17.1", 0x07000001, ("Extension", "0x07000001")),
        ("17.1", 0x0B000001, ("InjectionPoint", "0x0b000001")),
        ("16.1", 0x0B000001, ("?", "0x0b000001")),
        ("16.1", 0xDEADBEEF, ("?", "0xdeadbeef")),
        ("19rc1", 0x06000000, ("Client", "ClientRead")),
        ("19beta1", 0x06000007, ("Client", "0x06000007")),
        ("21", 0x06000000, ("?", "0x06000000")),
    ],
)
def test_label(version: str, value: int, label: tuple[str, str]) -> None:
    """A value has the name of its minor version, or is shown as a number where none is known."""
    assert WaitEvents(version).label(value) == label


@pytest.mark.parametrize("major", range(10, 21))
def test_names_are_unique(major: int) -> None:
    """Client:ClientRead is the same value in every version, and no name stands for two values."""
    events = WaitEvents(str(major))
    assert events.label(CLIENT_READ) == ("Client", "ClientRead")
    labels = [
        events.label(class_ << 24 | number) for class_ in range(1, 12) for number in range(65)
    ]
    known = [label for label in labels if label[0] != "?" and label[1] != "extension"]
    assert len(known) == len(set(known)) > 150


@pytest.mark.parametrize("version", ["19beta2", "20devel", "21.1"])
def test_warning(version: str) -> None:
    """A version whose names are not certain warns."""
    assert version in WaitEvents(version).warnings[0]
    assert WaitEvents("19.1").warnings == []


def test_merged() -> None:
    """Extensions' LWLock tranches share one name and so one value; other values stay."""
    values = np.array([0x0100004B, 0x01000050, 0x0100004A, 0x06000000], np.uint32)
    merged = WaitEvents("15.18").merged(values)
    assert merged.tolist() == [0x0100004B, 0x0100004B, 0x0100004A, 0x06000000]
    assert merged.dtype == np.uint32


def test_idle() -> None:
    """Idle is Client:ClientRead and the Activity class; 0 is idle of an interval alone."""
    values = (0, 0x06000000, 0x05000003, 0x06000001, 0x0A000001)
    assert [value for value in values if is_idle_wait(value)] == [0x06000000, 0x05000003]
    assert [value for value in values if is_idle(value)] == [0, 0x06000000, 0x05000003]


@pytest.mark.parametrize("text", ["", "fifteen", "15.", "15.1.2", "v15"])
def test_not_a_version(text: str) -> None:
    """What is no version is refused."""
    with pytest.raises(WaitfoldError, match="not a PostgreSQL version"):
        WaitEvents(text)
