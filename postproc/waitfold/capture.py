"""Opens a capture folder (docs/capture.md) or a bare perf.data, and says how to pair it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from waitfold.archive import is_bundle
from waitfold.backends import POSTMASTER, Backend, SeenBackends, read_backends, whole_lines
from waitfold.bundled import Bundled
from waitfold.errors import Misuse, PerfDataError, WaitfoldError
from waitfold.events import PairRule, Rule, SetRule
from waitfold.inputs import Input
from waitfold.perfdata import MAGICS as PERF_MAGICS
from waitfold.perfdata import Field, PerfData, probe_fields
from waitfold.perffolder import Parts, Pieces, pieces_in
from waitfold.probeset import OWN_GROUP, ProbeSet, load_set, load_sets
from waitfold.sched import name_events
from waitfold.stores import (
    Attachment,
    Late,
    Stores,
    WatchFile,
    births,
    lateness,
    read_attached,
    store_rule,
)
from waitfold.tracedat import MAGIC, TraceDat, listed
from waitfold.tracetext import TraceText
from waitfold.waitevents import Version, WaitEvents

FORMAT = 2
"""The capture format that is read."""

WAIT_EVENT = "wait-event"
"""The probe set that every capture holds first."""

File = PerfData | TraceDat | TraceText | Pieces | Parts
"""What was recorded by hand."""

_NEVER = (1 << 63) - 1


@dataclass(frozen=True)
class Naming:
    """What the user says about a bare perf.data, by --start, --end, --value, --pg-version."""

    start: str | None = None
    end: str | None = None
    value: str | None = None
    pg_version: str | None = None

    def options(self) -> list[str]:
        """Return the options that were given, as they are typed."""
        return ["--" + k.replace("_", "-") for k, v in vars(self).items() if v is not None]


@dataclass(frozen=True)
class Capture:
    """An opened capture.

    `rule` is that of wait events; `sets` are the other probe sets that it holds. `start_ns` and
    `end_ns` are the window in CLOCK_MONOTONIC, None where it begins with the first event or ends
    with the last. `late` is of mode mem alone.
    """

    path: Path
    files: list[File | WatchFile | Bundled]
    rule: Rule
    pg_version: str
    events: WaitEvents
    mode: str
    seen: SeenBackends
    start_ns: int | None = None
    end_ns: int | None = None
    sets: dict[str, ProbeSet] = field(default_factory=dict)
    manifest: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    late: Late | None = None

    def set_rule(self, name: str) -> SetRule:
        """Return a new rule of one of `sets`.

        Raises
        ------
        Misuse
            The capture does not hold it.

        """
        if name not in self.sets:
            held = ", ".join([WAIT_EVENT, *self.sets])
            raise Misuse(f"{self.path} does not hold the probe set '{name}', but: {held}")
        return self.sets[name].set_rule(self.manifest.get("group", OWN_GROUP))


def open_capture(path: Path, naming: Naming) -> Capture:
    """Open a capture folder, a bundle, or what was recorded by hand: docs/inputs.md lists it.

    Raises
    ------
    WaitfoldError
        It cannot be read, or is none of these.
    Misuse
        The naming options are missing, too many, or name what is not there.

    """
    opened = _opened(path, naming, None)
    assert isinstance(opened, Capture)
    return opened


def open_stacks(path: Path, naming: Naming) -> Capture | PerfData | TraceText:
    """Open a capture, as open_capture() does, or what holds stacks and no events of a probe set."""
    return _opened(path, naming, _stacks)


def _opened(
    path: Path, naming: Naming, plain: Callable[[File, Naming], PerfData | TraceText | None] | None
) -> Capture | PerfData | TraceText:
    try:
        if path.is_dir():
            return _by_perf(path, naming) or _open_folder(path, naming)
        input_ = Input(path)
        if is_bundle(input_.head):
            _no_naming(path, naming)
            # It reads captures, too, to make bundles of them.
            from waitfold.bundle import open_bundle

            return open_bundle(input_)
        data = _read(input_)
        return (plain and plain(data, naming)) or _by_hand(data, naming)
    except FileNotFoundError as error:
        raise WaitfoldError(f"{error.filename or path}: no such file or folder") from None
    except OSError as error:
        raise WaitfoldError(f"{error.filename or path}: {error.strerror}") from None


def _open_folder(folder: Path, naming: Naming) -> Capture:
    if not (folder / "manifest").exists():
        message = f"{folder} is not a capture: it has no manifest."
        if (folder / "perf.data").exists():
            message += f" To read its perf.data alone, name that: {folder / 'perf.data'}"
        raise WaitfoldError(message)
    _no_naming(folder, naming)
    manifest = _read_manifest(folder / "manifest")
    pg_version = manifest["pg_version"]
    events = WaitEvents(pg_version)
    warnings = list(events.warnings)
    start_ns, end_ns = _window(folder, manifest)
    if end_ns is None:
        warnings.append("the recorder was killed: the window ends with the last event")
    # As they were when it was recorded; captures that lack them go by those of today.
    known = load_sets() | {path.stem: load_set(path) for path in sorted(folder.glob("*.set"))}
    sets: dict[str, ProbeSet] = {}
    for name in manifest["sets"].split(","):
        if name not in known or (name != WAIT_EVENT and known[name].wait_field is not None):
            raise WaitfoldError(
                f"{folder} holds the probe set '{name}', which this waitfold does not know: "
                "read it with a newer one"
            )
        sets[name] = known[name]
    group = manifest.get("group", "")
    seen = SeenBackends({}, {})
    if (folder / "backends.tsv").exists():
        seen = read_backends(folder / "backends.tsv", Version.parse(pg_version).major, start_ns)
    else:
        warnings.append("backends.tsv is missing: processes are told apart by their waits only")
    if re.fullmatch(r"[0-9]{1,9}", manifest.get("postmaster", "")):
        seen.backends[int(manifest["postmaster"])] = Backend(POSTMASTER)
    # A perf that was killed did not write what the events are called and carry.
    fields = {
        f"{group}:{event}": probe_fields(list(typed.items()))
        for probe_set in sets.values()
        for event, typed in probe_set.fields.items()
    }
    files: list[File | WatchFile | Bundled]
    rule: Rule = known[WAIT_EVENT].rule(group)
    late = None
    since = 0
    if manifest["mode"] == "mem":
        if [*sets] != [WAIT_EVENT]:
            raise WaitfoldError(
                f"{folder / 'manifest'}: mode mem records wait events alone: the file is damaged"
            )
        rule = store_rule(Stores(folder / "sites.tsv", _load_base(folder, manifest)))
        attached = read_attached(folder / "attached.tsv")
        files = [*_watch_files(folder, attached, warnings)]
        late = lateness(attached, _births(folder, manifest, warnings), start_ns or 0)
        # The others are not recorded.
        recorded = {a.pid for a in attached if (a.attached_ns or _NEVER) <= (start_ns or 0)}
        for pid in seen.waits.keys() - recorded:
            del seen.waits[pid]
    elif manifest.get("engine") in ("ftrace", "trace-cmd"):
        trace = TraceDat(folder, ring="ring" in manifest)
        files = [trace]
        since = trace.since_ns
    else:
        data = PerfData(folder / "perf.data", fields)
        name_events(data, manifest.get("profiles", "").split(","))
        files = [data]
        if "ring" in manifest:
            each = _number(folder, manifest, "ring") // max(_number(folder, manifest, "cpus"), 1)
            # perf's buffers are a power of two.
            since = data.known_since_ns(1 << max(each, 1).bit_length() - 1)
    if "ring" in manifest:
        start_ns = max(start_ns or 0, since) or None
        # They were read when the recorder began, not when what the ring still holds did.
        seen.waits.clear()
    return Capture(
        folder,
        files,
        rule,
        pg_version,
        events,
        manifest["mode"],
        seen,
        start_ns,
        end_ns,
        {name: held for name, held in sets.items() if name != WAIT_EVENT},
        manifest,
        warnings,
        late,
    )


def _no_naming(path: Path, naming: Naming) -> None:
    if given := naming.options():
        raise Misuse(
            f"{path} is a capture, which itself says what it holds: leave out {', '.join(given)}"
        )


def _number(folder: Path, manifest: dict[str, str], key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", manifest.get(key, "")):
        raise WaitfoldError(f"{folder / 'manifest'}: {key} is not a number")
    return int(manifest[key])


def _load_base(folder: Path, manifest: dict[str, str]) -> int:
    if not re.fullmatch(r"0x[0-9a-f]{1,16}", manifest.get("load_base", "")):
        raise WaitfoldError(f"{folder / 'manifest'}: load_base is not an address")
    return int(manifest["load_base"], 16)


def _births(folder: Path, manifest: dict[str, str], warnings: list[str]) -> list[tuple[int, int]]:
    """Return who was born while the whole server was recorded; nobody where nothing tells."""
    file, postmaster = folder / "perf.data.0", manifest.get("postmaster", "")
    if not file.exists() or not re.fullmatch(r"[0-9]{1,9}", postmaster):
        return []
    try:
        return births(file, int(postmaster))
    except PerfDataError as error:
        warnings.append(str(error))
        return []


def _watch_files(
    folder: Path, attached: list[Attachment], warnings: list[str]
) -> Iterator[WatchFile]:
    """Yield the files of the backends that were attached to; warn of those that cannot be read."""
    for backend in attached:
        if backend.attached_ns is not None:
            try:
                yield WatchFile(folder, backend)
            except PerfDataError as error:
                warnings.append(str(error))


def _read_manifest(path: Path) -> dict[str, str]:
    manifest: dict[str, str] = {}
    for number, line in enumerate(whole_lines(path), 1):
        key, tab, value = line.partition("\t")
        if not tab:
            raise WaitfoldError(f"{path}:{number}: not 'key<TAB>value': {line[:60]!r}")
        manifest[key] = value
    form = manifest.get("format", "")
    if not re.fullmatch(r"[0-9]{1,9}", form):
        raise WaitfoldError(f"{path}: no format: not the manifest of a capture, or cut short")
    if int(form) != FORMAT:
        raise WaitfoldError(
            f"{path}: a capture of format {form}, and this waitfold reads format {FORMAT}: read it "
            f"with {'a newer' if int(form) > FORMAT else 'an older'} one"
        )
    for key in ("sets", "mode", "group", "pg_version"):
        if key not in manifest and (key, manifest.get("mode")) != ("group", "mem"):
            raise WaitfoldError(f"{path}: no '{key}': cut short or damaged")
    return manifest


def _window(folder: Path, manifest: dict[str, str]) -> tuple[int | None, int | None]:
    times = [manifest.get(key) for key in ("start_ns", "end_ns")]
    if any(text is not None and not re.fullmatch(r"[0-9]{1,18}", text) for text in times):
        raise WaitfoldError(f"{folder / 'manifest'}: start_ns or end_ns is not a time in ns")
    start_ns, end_ns = (None if text is None else int(text) for text in times)
    if start_ns is not None and end_ns is not None and end_ns < start_ns:
        raise WaitfoldError(f"{folder / 'manifest'}: the window ends before it begins")
    return start_ns, end_ns


def _by_perf(folder: Path, naming: Naming) -> Capture | None:
    """Open a folder that perf record itself made, None if it is another."""
    if (folder / "manifest").exists():
        return None
    if (folder / "data").exists():
        return _by_hand(Parts(folder), naming)
    files = pieces_in(folder)
    return _by_hand(Pieces(folder, files, _piece), naming) if files else None


def _piece(path: Path, before: PerfData | None) -> PerfData:
    fallback = {e.name: e.fields for e in before.events if e.fields} if before else None
    data = _read(Input(path), fallback)
    if not isinstance(data, PerfData):
        raise WaitfoldError(
            f"{path} is no perf.data, as its name says: name the files to read one by one"
        )
    return data


def _by_hand(data: File, naming: Naming) -> Capture:
    path = data.path
    if isinstance(data, PerfData) and data.cut and not any(e.fields for e in data.events):
        raise WaitfoldError(
            f"{data.cut} perf writes the names and fields of events only at its end, so only a "
            "capture folder, whose manifest has them, can be read after that"
        )
    rule = _named_rule(data, naming) if naming.start else _known_rule(data, naming)
    if naming.pg_version is None:
        raise Misuse(
            f"{path} does not say which PostgreSQL it is of: add --pg-version, "
            "as in --pg-version 15.18"
        )
    try:
        events = WaitEvents(naming.pg_version)
    except WaitfoldError as error:
        raise Misuse(f"--pg-version: {error}") from None
    return Capture(
        path,
        [data],
        rule,
        naming.pg_version,
        events,
        "unknown",
        SeenBackends({}, {}),
        sets=_other_sets(data),
        warnings=list(events.warnings),
    )


def _read(input_: Input, fallback: Mapping[str, Mapping[str, Field]] | None = None) -> File:
    """Return what reads an input, by its first bytes.

    Raises
    ------
    WaitfoldError
        It is nothing that is read.

    """
    opener = None if input_.plain_file else input_.opener
    data: PerfData | TraceDat
    if input_.head.startswith(MAGIC):
        data = TraceDat(input_.path, opener=opener and opener())
    elif input_.head.startswith(PERF_MAGICS):
        data = PerfData(input_.path, fallback, opener and opener())
    else:
        return TraceText(input_)
    data.cut = data.cut or input_.cut
    return data


def _has(data: File, pattern: str) -> bool:
    if isinstance(data, TraceText):
        return data.has(pattern)
    return any(fnmatchcase(event.name, pattern) for event in data.events)


def _named_rule(data: File, naming: Naming) -> PairRule:
    if naming.start is None or naming.value is None:
        raise Misuse("--start EVENT wants --value FIELD: the field that holds wait_event_info")
    whole = not isinstance(data, TraceText) or data.whole
    for event in filter(None, (naming.start, naming.end)):
        if whole and not _has(data, event):
            raise Misuse(f"no event '{event}' in {data.path}, which has: {_names(data)}")
    if naming.end is None:
        return PairRule(naming.start, naming.value, naming.start, 0)
    return PairRule(naming.start, naming.value, naming.end, None)


def _stacks(data: File, naming: Naming) -> PerfData | TraceText | None:
    """Return what was opened if it holds stacks and no events of a probe set."""
    if not isinstance(data, PerfData | TraceText) or naming.options():
        return None
    rules = [probe_set.rule() for probe_set in load_sets().values()]
    waits = any(all(_has(data, use.event) for use in rule.uses) for rule in rules)
    return data if data.has_stacks and not waits else None


def _known_rule(data: File, naming: Naming) -> Rule:
    if stray := [option for option in naming.options() if option != "--pg-version"]:
        raise Misuse(f"{', '.join(stray)} without --start EVENT")
    for probe_set in load_sets().values():
        rule = probe_set.rule()
        # The beginning of a text may show waits that start and none that end.
        enough = any if isinstance(data, TraceText) else all
        if isinstance(rule, PairRule) and enough(_has(data, use.event) for use in rule.uses):
            return rule
    if _other_sets(data):
        # Read by --set; whoever asks for wait events is told that there are none.
        return load_sets()[WAIT_EVENT].rule()
    fold = ", or fold its stacks: waitfold fold" if getattr(data, "has_stacks", False) else ""
    raise Misuse(
        f"no wait events that waitfold knows in {data.path}, which has: {_names(data)}. "
        f"Name them by --start EVENT --end EVENT --value FIELD{fold}"
    )


def _other_sets(data: File) -> dict[str, ProbeSet]:
    """Return the probe sets, other than wait events, all of whose events a file has."""
    return {
        name: probe_set
        for name, probe_set in load_sets().items()
        if probe_set.wait_field is None
        and all(_has(data, use.event) for use in probe_set.rule().uses)
    }


def _names(data: File) -> str:
    return listed([event.name for event in data.events])
