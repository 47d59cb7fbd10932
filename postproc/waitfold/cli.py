"""The `waitfold` command."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from waitfold import __version__, audit
from waitfold import diff as comparison
from waitfold.account import DIMENSIONS, account, report_of
from waitfold.analysis import Progress, analyse, analyse_set, intervals, set_intervals
from waitfold.bundle import make_bundle, size
from waitfold.capture import WAIT_EVENT, Capture, Naming, open_capture, open_stacks
from waitfold.errors import Misuse, WaitfoldError
from waitfold.events import TransitionStream
from waitfold.join import join
from waitfold.perfdata import PerfData
from waitfold.profile import read_traces, text_traces
from waitfold.queries import SET as QUERY_SET
from waitfold.redact import KINDS
from waitfold.show import diff as show_diff
from waitfold.show import fold, markdown, text
from waitfold.show.timeline import timeline
from waitfold.symbols import captured_symbols
from waitfold.tracetext import TraceText

SCRIPTS = {
    "record": "record a running server into a capture",
    "probes": "list, add, remove and show probes",
    "doctor": "say what this host and server lack for recording",
    "watch": "watch writes to a global of a running server: xids, oids, any variable",
}

EXPORTS = ("perfetto", "speedscope", "firefox", "csv", "parquet")

EXAMPLES = {
    "report": """\
examples:
  waitfold report waits-db1
      where the time went: every wait event, and the time without one
  waitfold report waits-db1 --by backend
      the same by process
  waitfold report waits-db1 --by query,event
      which statements wait for what; made by: waitfold record --with all ...
  waitfold report waits-db1 --audit
      blocked in no wait event, and on a CPU inside one, by stack
  waitfold report waits-db1 --histogram | less
      how long the waits of each event were
  waitfold report waits-db1 --json | jq '.waits[0]'
      for a program; times in ns
  waitfold report waits-db1 --markdown
      to be pasted into an issue or an e-mail
  waitfold report waits-db1 --html waits.html
      all of it as one page for a browser, which needs no network
  waitfold report perf.data --pg-version 15.18
      a perf.data of a server with wait__event probes, recorded by hand
  perf script --ns | ssh desk 'waitfold report - --pg-version 15.18'
      the text of one, from standard input
  waitfold report perf.data --start probe:w --value v --pg-version 17
      one of your own probe at the stores to wait_event_info; v=0 ends a wait""",
    "waits": """\
examples:
  waitfold waits waits-db1 -o waits.parquet
      for pandas, DuckDB, Spark
  waitfold waits waits-db1 -o - | awk -F, '$5 == "Lock" && $2 > 1e9'
      lock waits of more than a second
  waitfold waits waits-db1 --set query -o queries.parquet
      of a capture made by: waitfold record --with query ...""",
    "fold": """\
examples:
  waitfold fold waits-db1 | sort -t' ' -k2 -n
  waitfold fold waits-db1 | flamegraph.pl --countname ns > waits.svg
  waitfold fold waits-db1 --set lwlock-wait
      of a capture made by: waitfold record --with lwlock-wait ...
  waitfold fold waits-db1 --kind wall --event --query | grep 'Lock:.*blocked'
      of a capture made by: waitfold record --with all ...
  perf record -e task-clock -F 99 --call-graph fp -a -- sleep 10
  waitfold fold perf.data
      a plain profile, as perf script | stackcollapse-perf.pl folds it""",
    "flamegraph": """\
examples:
  waitfold flamegraph waits-db1 -o waits.svg
  waitfold flamegraph waits-db1 -o waits.svg --title 'Monday, slow checkout'
  waitfold flamegraph waits-db1 -o wall.svg --kind wall --event
      all time by stack; recorded with: waitfold record --with offcpu,oncpu ...""",
    "bundle": """\
examples:
  waitfold bundle waits-db1 -o waits-db1.waitfold
      for a bug report: says how large it is, and what it left out
  waitfold report waits-db1.waitfold
      as of the capture, and so all other verbs
  waitfold bundle waits-db1 -o waits-db1.waitfold --max 1M --keep application
      no larger than a megabyte, and application names as they are
  tar xf waits-db1.waitfold
      what is in it""",
    "diff": """\
examples:
  waitfold diff monday tuesday
      by wait event, and by transaction where both captures tell how many there were
  waitfold diff monday tuesday --per second --flamegraph diff.svg
      red: more than before, blue: less
  waitfold diff monday tuesday --by query
      of captures made by: waitfold record --with query ...
  waitfold diff monday tuesday --json | jq '.rows[] | select(.significant) | .name'""",
    "timeline": """\
examples:
  waitfold timeline waits-db1 -o waits.svg
      columns of a two-hundredth of the recording or so
  waitfold timeline waits-db1 -o convoy.svg --from 3.2 --to 3.7
      half a second of it, by the millisecond""",
    "export": """\
examples:
  waitfold export waits-db1 --format perfetto -o waits.pftrace
      for ui.perfetto.dev, which opens it without sending it anywhere
  waitfold export waits-db1 --format speedscope -o waits.speedscope.json
  waitfold export waits-db1 --format firefox -o waits.json
      for profiler.firefox.com, the same
  waitfold export waits-db1 --format csv -o - | head""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0 done, 1 could not, 2 called wrongly."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed by the caller, as by >&-
            return 1
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        if args and args[0] in SCRIPTS:
            _run_script(args[0], args[1:])
        options = _parser().parse_args(args)
        options.run(options)
        sys.stdout.flush()
        return 0
    except WaitfoldError as error:
        _complain(str(error))
        return 2 if isinstance(error, Misuse) else 1
    except BrokenPipeError:
        # The reader has what it wanted. Nothing is left for the interpreter to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        _complain(f"{error.filename or 'stdout'}: {error.strerror or error}")
        return 1
    except Exception as error:
        if os.environ.get("WAITFOLD_DEBUG"):
            raise
        _complain(
            f"internal error: {type(error).__name__}: {error}. This is a bug of waitfold; "
            "WAITFOLD_DEBUG=1 shows where it is"
        )
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="waitfold",
        description="Where PostgreSQL's time went, from recorded wait events.",
        epilog="examples:\n"
        "  waitfold record -D /var/lib/postgresql/15/main -d 10 -o waits-db1\n"
        "  waitfold report waits-db1\n"
        "  waitfold flamegraph waits-db1 -o waits.svg\n\n"
        "exit status: 0 done, 1 could not, 2 called wrongly",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"waitfold {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, about in SCRIPTS.items():
        verbs.add_parser(name, help=about, add_help=False)

    report = _verb(
        verbs,
        "report",
        _report,
        "where the time went, by wait event",
        "Counts, means and percentiles are of the complete intervals; what was seen of those that "
        "the window or a loss cut is added to the totals only (in JSON apart, as cut_ns).",
    )
    report.add_argument(
        "--by",
        metavar="DIM[,DIM...]",
        help=f"a line for each {', '.join(DIMENSIONS[:-1])} or {DIMENSIONS[-1]}, or each "
        "combination of them",
    )
    report.add_argument(
        "--audit",
        action="store_true",
        help="what wait events do not say: blocked in none, and on a CPU inside one, by stack",
    )
    report.add_argument("--histogram", action="store_true", help="add a histogram per event")
    report.add_argument(
        "--json",
        action="store_true",
        help="for a program; always holds events and processes, no histogram",
    )
    report.add_argument(
        "--markdown",
        action="store_true",
        help="to be pasted into an issue or an e-mail: GitHub's tables, at most 65,000 characters",
    )
    report.add_argument(
        "--html",
        metavar="FILE",
        help="all of it, with timeline and flame graphs, as one page; replaced if it exists",
    )

    rows = _verb(
        verbs,
        "waits",
        _waits,
        "the waits themselves, one row per interval",
        "Columns: start_ns, dur_ns, pid, tid, class, name, flags. flags is empty for a complete "
        "interval, else start, end (the window began or ended in it), lost (samples were), joined "
        "by |; dur_ns is then the part that was seen, a lower bound. Rows come piece by piece, "
        "in order of start within a piece.",
    )
    rows.add_argument(
        "-o",
        metavar="FILE",
        required=True,
        help="FILE.csv or FILE.parquet, replaced if it exists; - for CSV to stdout",
    )

    stacks = _verb(
        verbs,
        "fold",
        _fold,
        "folded stacks: backend type;class;event, weight in ns",
        "--kind oncpu, offcpu and wall give backend type;frame;... of what was recorded with "
        "--with oncpu,offcpu. On-CPU time is the samples' weight; off-CPU time, blocked and on the "
        "run queue, goes to the stack that the CPU was left with; wall has both, each stack ending "
        "in [on-CPU], [run queue] or [blocked]. "
        "Idle waits (blocked in Client:ClientRead or the Activity class) are left out, as they "
        "would be most of the time. A perf.data, or text of perf script, with stacks and no wait "
        "events gives comm;frame;... and the weight of the samples, which is ns for task-clock and "
        "cpu-clock.",
    )
    graph = _verb(
        verbs,
        "flamegraph",
        _flamegraph,
        "a flame graph (SVG) of the folded stacks",
        "Of the same stacks as waitfold fold. Drawn by flamegraph.pl (on PATH, or as Debian's "
        "libdevel-nytprof-perl has it) or inferno-flamegraph. Of wall-clock time what was on the "
        "CPU is red, what was off it blue, names that are in both are pale, and [run queue] is "
        "yellow; wait events have the colour of their class.",
    )
    graph.add_argument("-o", metavar="FILE.svg", required=True, help="replaced if it exists")
    graph.add_argument("--title", help="default: version and name of the capture")
    _add_diff(verbs)
    picture = _verb(
        verbs,
        "timeline",
        _timeline,
        "a heat map of the waits over time, and what each process did (SVG)",
        "Above: time by length of wait, the colour is the time waited; idle waits are left out. "
        "Below: a lane for each of the processes that did most, and one for all others.",
    )
    picture.add_argument("-o", metavar="FILE.svg", required=True, help="replaced if it exists")
    picture.add_argument("--title", help="default: version and name of the capture")
    picture.add_argument(
        "--from",
        dest="from_s",
        metavar="SECONDS",
        type=float,
        help="draw from here on, counted from the start of the recording",
    )
    picture.add_argument("--to", dest="to_s", metavar="SECONDS", type=float, help="draw until here")

    exported = _verb(
        verbs,
        "export",
        _export,
        "the capture for another tool: Perfetto, speedscope, Firefox Profiler, CSV, Parquet",
        "For the first three: what each process did, by time, with its wait events, and what else "
        "was recorded of it: queries, what the scheduler did with it, stacks on a CPU. As CSV and "
        "Parquet the waits, a row each, with all that is known of each.",
    )
    exported.add_argument("--format", required=True, choices=EXPORTS, help="of what tool")
    exported.add_argument(
        "-o",
        metavar="FILE",
        required=True,
        help="replaced if it exists; - for stdout, but not of perfetto and parquet",
    )

    sent = _verb(
        verbs,
        "bundle",
        _bundle,
        "the capture as one small file for others, without what is yours",
        "Literals in queries, names of hosts, users, databases and applications, addresses and "
        "paths are left out or made pseudonyms; it says what was removed and what remains.",
    )
    sent.add_argument("-o", metavar="FILE", required=True, help="replaced if it exists")
    sent.add_argument(
        "--max",
        metavar="SIZE",
        help="no larger than this, as 500K or 5M: stacks are trimmed, no figure of the report",
    )
    sent.add_argument(
        "--keep",
        metavar="NAME",
        action="append",
        default=[],
        help=f"leave in what is removed otherwise, again for more: {', '.join(KINDS)}",
    )

    for verb in (stacks, graph):
        verb.add_argument(
            "--kind",
            choices=["waits", *fold.KINDS],
            default="waits",
            help="time by wait event (the default), or by stack: on the CPU, off it, both",
        )
        verb.add_argument(
            "--event", action="store_true", help="with --kind: the wait event over the stack"
        )
        verb.add_argument(
            "--query", action="store_true", help="with --kind: the query below the stack"
        )
        verb.add_argument("--idle", action="store_true", help="idle waits too")
    for verb in (rows, stacks, graph):
        verb.add_argument(
            "--set",
            metavar="NAME",
            default=WAIT_EVENT,
            help="of this probe set, which was recorded with --with, instead of wait events",
        )
    return parser


def _add_diff(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    diff = verbs.add_parser(
        "diff",
        help="what changed between two captures by more than noise",
        description=textwrap.fill(
            "What changed between two captures by more than noise: time, number and mean time of "
            "each wait event, statement or stack, the greatest change that is certain first."
        ),
        epilog=EXAMPLES["diff"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    diff.set_defaults(run=_diff)
    for name in ("before", "after"):
        diff.add_argument(name, metavar=name.upper(), type=Path, help="as CAPTURE elsewhere")
    _name_options(diff)
    diff.add_argument(
        "--by",
        choices=[*comparison.STRETCHES],
        default="event",
        help="what is compared (default: event)",
    )
    diff.add_argument(
        "--per",
        choices=["second", "transaction"],
        help="what times and numbers are divided by (default: transaction, where both captures "
        "tell how many there were, by --with transaction or query; else second)",
    )
    diff.add_argument("--json", action="store_true", help="for a program; all rows")
    diff.add_argument(
        "--flamegraph",
        metavar="FILE.svg",
        help="also draw both in one: as wide as after, red what is more than before, blue less",
    )


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], None],
    about: str,
    more: str = "",
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=EXAMPLES[name],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if more:
        verb.description = textwrap.fill(f"{verb.description} {more}")
    verb.set_defaults(run=run)
    verb.add_argument(
        "capture",
        metavar="CAPTURE",
        type=Path,
        help="a capture folder, a bundle, or a perf.data, a trace.dat or their text, recorded by "
        "hand; - for standard input",
    )
    _name_options(verb)
    return verb


def _name_options(verb: argparse.ArgumentParser) -> None:
    named = verb.add_argument_group("a perf.data, a trace.dat or their text, recorded by hand")
    named.add_argument(
        "--start", metavar="EVENT", help="perf's name of the event that begins a wait"
    )
    named.add_argument("--value", metavar="FIELD", help="its field that holds wait_event_info")
    named.add_argument(
        "--end",
        metavar="EVENT",
        help="event that ends one; without it, value 0 of the start event does",
    )
    named.add_argument(
        "--pg-version",
        metavar="N",
        help="the server's version, as 15.18; a bare 15 means its newest minor",
    )


def _naming(options: argparse.Namespace) -> Naming:
    return Naming(options.start, options.end, options.value, options.pg_version)


def _open(options: argparse.Namespace) -> Capture:
    return open_capture(options.capture, _naming(options))


def _report(options: argparse.Namespace) -> None:
    if bool(options.html) + options.json + options.markdown > 1:
        raise Misuse("--json, --markdown and --html: give one of them")
    if options.html and (options.by or options.audit or options.histogram):
        raise Misuse("--html goes without --by, --audit and --histogram: the page holds all")
    if options.json and (options.by or options.histogram):
        raise Misuse("--json goes without --by and --histogram: it always holds the same")
    if options.markdown and options.histogram:
        raise Misuse("--markdown goes without --histogram")
    by = options.by.split(",") if options.by else []
    for dimension in by:
        if dimension not in DIMENSIONS or by.count(dimension) > 1:
            raise Misuse(f"--by {options.by}: give some of {', '.join(DIMENSIONS)}, each once")
    capture = _open(options)
    if options.audit:
        if by or options.histogram:
            raise Misuse("--audit goes without --by and --histogram")
        _audit(capture, options)
        return
    if "query" in by and QUERY_SET not in capture.sets:
        raise Misuse(f"{capture.path} does not hold the queries: waitfold record --with query ...")
    analysis, sets, accounted = report_of(capture, by, _progress())
    if options.html:
        # pandas and Arrow take longer to import than a small capture to read.
        from waitfold.show.html import page

        content = page(analysis, sets, accounted, _progress())
        with _replacing(Path(options.html)) as file:
            file.write(content)
        return
    if options.json:
        sys.stdout.write(text.report_json(analysis, sets, accounted))
    elif options.markdown:
        sys.stdout.write(markdown.report_markdown(analysis, by, sets, accounted))
    else:
        _say(text.report_text(analysis, by, options.histogram, sets, accounted))


def _audit(capture: Capture, options: argparse.Namespace) -> None:
    data, events = audit.profile_events(capture)
    accounted = account(join(capture, _progress()))
    traces = read_traces(data, events, captured_symbols(capture.path))
    blocked, burnt = audit.unexplained(accounted, traces), audit.burnt(accounted, traces)
    if options.json:
        sys.stdout.write(text.audit_json(blocked, burnt))
    elif options.markdown:
        sys.stdout.write(markdown.audit_markdown(accounted, blocked, burnt))
    else:
        _say(text.audit_text(accounted, blocked, burnt))


def _waits(options: argparse.Namespace) -> None:
    # Arrow takes longer to import than a small capture to read, and only this needs it.
    from waitfold.show import waits

    to_stdout = options.o == "-"
    if not to_stdout and not options.o.endswith((".csv", ".parquet")):
        raise Misuse(f"-o {options.o}: the name must end in .csv or .parquet, or be -")
    capture = _open(options)
    label: waits.Label
    if options.set == WAIT_EVENT:
        stream, batches = intervals(capture, _progress())
        label = capture.events.label
    else:
        stream, batches, names = set_intervals(capture, options.set, _progress())
        label = names.label

    def write(file: IO[bytes]) -> None:
        if options.o.endswith(".parquet"):
            waits.write_parquet(batches, label, file)
        else:
            waits.write_csv(batches, label, file, quoted=options.set != WAIT_EVENT)

    if to_stdout:
        write(sys.stdout.buffer)
    else:
        with _replacing(Path(options.o)) as file:
            write(file)
    _warn(capture, stream)


def _fold(options: argparse.Namespace) -> None:
    sys.stdout.write(_stacks(options)[0])


def _flamegraph(options: argparse.Namespace) -> None:
    stacks, look = _stacks(options)
    if options.title is not None:
        look = look._replace(title=options.title)
    svg = fold.flamegraph(stacks, look)
    with _replacing(Path(options.o)) as file:
        file.write(svg)


def _stacks(options: argparse.Namespace) -> tuple[str, fold.Look]:
    """Return the folded stacks that the options ask for, and how a flame graph of them looks."""
    if options.set != WAIT_EVENT:
        return _set_stacks(options)
    if options.kind != "waits":
        return _time_stacks(options)
    if options.event or options.query:
        raise Misuse("--event and --query are of --kind oncpu, offcpu and wall")
    capture = open_stacks(options.capture, _naming(options))
    if not isinstance(capture, Capture):
        return _profile_stacks(capture, options)
    analysis = analyse(capture, _progress())
    _warn(capture, analysis.stream)
    stacks = fold.folded(analysis, options.idle)
    return stacks, fold.Look(_title("Waits", capture))


def _title(what: str, capture: Capture) -> str:
    return f"{what} of PostgreSQL {capture.pg_version}, {capture.path.resolve().name}"


def _set_stacks(options: argparse.Namespace) -> tuple[str, fold.Look]:
    if options.kind != "waits" or options.event or options.query:
        raise Misuse("--set goes without --kind, --event and --query")
    if options.idle:
        raise Misuse("--idle goes without --set: only wait events are idle")
    capture = _open(options)
    one = analyse_set(capture, options.set, _progress())
    _warn(capture, one.stream)
    return fold.folded_set(one), fold.Look(_title(options.set, capture))


def _profile_stacks(
    data: PerfData | TraceText, options: argparse.Namespace
) -> tuple[str, fold.Look]:
    """Fold a perf.data without wait events, that of `perf record --call-graph`, or its text."""
    if options.idle:
        raise Misuse(f"--idle is of wait events, and {data.path} holds none")
    if isinstance(data, PerfData):
        traces = read_traces(data, [event for event in data.events if event.has_callchain])
    else:
        traces = text_traces(data)
    for warning in traces.warnings:
        _complain(f"warning: {warning}")
    if not len(traces.time_ns):
        raise WaitfoldError(f"{data.path} holds no sample with a stack: nothing ran on a CPU")
    first, *others = traces.sampled
    event = traces.events[first].name
    if others:
        names = ", ".join(traces.events[i].name for i in others)
        _complain(
            f"warning: only stacks of {event} are folded, as its sample is the first; "
            f"{data.path} also has {names}"
        )
    count = "ns" if re.match(r"(task|cpu)-clock\b", event) else event
    look = fold.Look(f"{event}, {data.path.resolve().name}", count, "hot")
    return fold.folded_profile(traces, first), look


def _time_stacks(options: argparse.Namespace) -> tuple[str, fold.Look]:
    """Fold the on-CPU and off-CPU time of a capture's processes."""
    capture = _open(options)
    kind = fold.KINDS[options.kind]
    data, events = audit.profile_events(capture, kind.events)
    if options.query and "query" not in capture.sets:
        raise Misuse(f"{capture.path} was recorded without queries: waitfold record --with query")
    joined = join(capture, _progress())
    for warning in joined.warnings:
        _complain(f"warning: {warning}")
    shown = fold.Shown(options.event, options.query, options.idle)
    traces = read_traces(data, events, captured_symbols(capture.path))
    stacks = fold.folded_times(joined, traces, kind, shown)
    return stacks, fold.look(stacks, kind, shown, _title(kind.about, capture))


def _timeline(options: argparse.Namespace) -> None:
    capture = _open(options)
    title = _title("Waits", capture) if options.title is None else options.title
    svg, warnings = timeline(capture, title, options.from_s, options.to_s, _progress())
    with _replacing(Path(options.o)) as file:
        file.write(svg.encode())
    for warning in warnings:
        _complain(f"warning: {warning}")


def _export(options: argparse.Namespace) -> None:
    # pandas and Arrow take longer to import than a small capture to read.
    from waitfold.api import Recording
    from waitfold.show.export import BINARY, WRITERS

    if options.o == "-" and options.format in BINARY:
        raise Misuse(f"--format {options.format} is no text for stdout: name a file with -o")
    recording = Recording(_open(options), _progress())
    write = WRITERS[options.format]
    if options.o == "-":
        write(recording, sys.stdout.buffer)
    else:
        with _replacing(Path(options.o)) as file:
            write(recording, file)
    for warning in recording.warnings:
        _complain(f"warning: {warning}")
    if recording.joined.lost:
        _complain(f"warning: {recording.joined.lost} samples were lost")


def _bundle(options: argparse.Namespace) -> None:
    if options.o == "-":
        raise Misuse("a bundle is no text for stdout: name a file with -o")
    target = Path(options.o)
    largest = None
    if options.max is not None:
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([kKM]?)", options.max)
        if match is None:
            raise Misuse(f"--max {options.max}: give a number of bytes, or one with K or M")
        largest = int(float(match[1]) * {"": 1, "K": 1000, "M": 1_000_000}[match[2].upper()])
    made = make_bundle(_open(options), options.keep, largest, _progress())
    with _replacing(target) as file:
        file.write(made.content)
    _say(f"{target}: {size(len(made.content))}, {size(made.unpacked)} unpacked\n{made.removed}")


def _naming_of(path: Path, options: argparse.Namespace) -> Naming:
    """Return what is said of a side of diff: a capture folder says itself what it holds."""
    return Naming() if (path / "manifest").exists() else _naming(options)


def _diff(options: argparse.Namespace) -> None:
    sides = (options.before, options.after)
    before, after = (
        comparison.read_side(open_capture(path, naming), options.by, _progress())
        for path, naming in ((path, _naming_of(path, options)) for path in sides)
    )
    if options.by == "event":
        after = comparison.in_terms_of(before, after)
    per_transaction = comparison.per_transaction(before, after, options.per)
    unit = "transaction" if per_transaction else "second"
    differs, apart = comparison.differences(before, after, options.by)
    rows = comparison.compare(before, after, per_transaction, apart)
    if options.flamegraph:
        stacks = show_diff.folded(before, after, per_transaction)
        if not stacks:
            raise WaitfoldError("nothing to draw: no waits in either capture")
        title = f"{before.capture.path.resolve().name} to {after.capture.path.resolve().name}"
        svg = fold.flamegraph(stacks, fold.Look(f"{title}: red more, blue less, per {unit}"))
        with _replacing(Path(options.flamegraph)) as file:
            file.write(svg)
    if options.json:
        sys.stdout.write(show_diff.diff_json(before, after, rows, differs, options.by, unit))
    else:
        _say(show_diff.diff_text(before, after, rows, differs, options.by, unit))


def _warn(capture: Capture, stream: TransitionStream) -> None:
    for warning in [*capture.warnings, *stream.warnings]:
        _complain(f"warning: {warning}")
    if stream.lost:
        _complain(f"warning: {stream.lost} samples were lost")


def _run_script(verb: str, args: list[str]) -> None:
    name = f"waitfold-{verb}"
    checkout = Path(__file__).resolve().parents[2] / "scripts"
    beside = Path(sys.argv[0]).resolve().parent
    script = shutil.which(name, path=f"{checkout}{os.pathsep}{beside}") or shutil.which(name)
    if script is None:
        raise WaitfoldError(
            f"{name} is not installed: it is one of the shell scripts, in scripts/ "
            "of waitfold's source; 'make install' puts them on PATH"
        )
    os.execv(script, [script, *args])


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write that takes the place of `path` when it is complete.

    What is no regular file, as /dev/null, is written to as it is.
    """
    target = path.resolve()
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                yield file
            return
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
            mask = os.umask(0)
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise WaitfoldError(f"{path} cannot be written: {error.strerror or error}") from None


def _progress() -> Progress | None:
    """Return what shows the progress on a terminal once reading takes more than two seconds."""
    if not sys.stderr.isatty():
        return None
    began = time.monotonic()
    shown = False

    def show(done: int, total: int) -> None:
        nonlocal shown
        if done >= total:
            sys.stderr.write("\r\033[K" if shown else "")
        elif time.monotonic() - began > 2:
            shown = True
            sys.stderr.write(f"\rread {100 * done // total} % of {total / 1e6:.0f} MB")
        sys.stderr.flush()

    return show


def _say(message: str) -> None:
    # Names in a capture are somebody else's: no escape sequences to the terminal.
    sys.stdout.write("".join(c if c == "\n" or c.isprintable() else "?" for c in message))


def _complain(message: str) -> None:
    printable = "".join(c if c.isprintable() else "?" for c in message)
    print(f"waitfold: {printable}", file=sys.stderr)
