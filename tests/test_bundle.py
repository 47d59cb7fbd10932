"""Bundles: the same figures, nothing of what was to be removed, and no archive that harms."""

from __future__ import annotations

import base64
import codecs
import csv
import html
import io
import json
import lzma
import random
import re
import shutil
import struct
import subprocess
import tarfile
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cluster, Recorder, manifest, report, waitfold
from test_queries import Connection

from waitfold import archive, inputs
from waitfold.account import account, shape
from waitfold.capture import Naming, open_capture
from waitfold.join import join
from waitfold.redact import KINDS, Redactor, without_literals

DATA = Path(__file__).parent / "data"
CAPTURES = [DATA / "sets", *(DATA / "fuzz" / name for name in ("all", "mem", "ftrace", "ring"))]
KEEP_ALL = [word for kind in KINDS for word in ("--keep", kind)]


def bundled(capture: Path, folder: Path, *options: str) -> Path:
    """Make a bundle of a capture."""
    path = folder / "x.waitfold"
    answer = waitfold("bundle", capture, "-o", path, *options)
    assert answer.returncode == 0, answer.stderr
    return path


def refusal(*args: str | Path, status: int = 1) -> str:
    """What waitfold says when it refuses something."""
    answer = waitfold(*args)
    assert answer.returncode == status, answer.stdout[:500]
    assert answer.stderr.count("\n") == 1 and "internal error" not in answer.stderr
    return answer.stderr


# The same figures


def views(capture: Path) -> Iterator[tuple[str | Path, ...]]:
    """The commands whose output is all figures and names."""
    yield "report", capture
    yield "report", capture, "--json"
    yield "report", capture, "--audit", "--json"
    yield "report", capture, "--by", "database,user,application,query,event"
    yield "fold", capture
    yield "fold", capture, "--kind", "wall", "--event", "--query"
    yield "timeline", capture, "-o", "-"
    for name in manifest(capture)["sets"].split(",")[:3]:
        yield "fold", capture, "--set", name


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name)
def test_same_figures(capture: Path, tmp_path: Path) -> None:
    """Every view of a bundle of which nothing was removed is that of the capture."""
    bundle = bundled(capture, tmp_path, *KEEP_ALL)
    named = tmp_path / "capture.waitfold"
    shutil.copytree(capture, named)
    for view in views(named):
        if view[0] == "timeline":
            view = (*view[:-1], tmp_path / "o.svg")
        of_capture = waitfold(*view), drawing(tmp_path)
        other = [bundle if word == named else word for word in view]
        of_bundle = waitfold(*other), drawing(tmp_path)
        for one, two in zip(of_capture, of_bundle, strict=True):
            assert words(two).replace("x.waitfold", "capture.waitfold") == words(one), view
    assert rows(bundle) == rows(named)


def drawing(folder: Path) -> str:
    """What was drawn, if anything was."""
    file = folder / "o.svg"
    text = file.read_text() if file.exists() else ""
    file.unlink(missing_ok=True)
    return text


def words(answer: str | subprocess.CompletedProcess[str]) -> str:
    """What was said."""
    return answer if isinstance(answer, str) else answer.stdout + answer.stderr


def rows(capture: Path) -> list[list[str]]:
    """The intervals with all that is known of each; which come first is no figure."""
    answer = waitfold("export", capture, "--format", "csv", "-o", "-")
    assert answer.returncode == 0, answer.stderr
    return sorted(csv.reader(io.StringIO(answer.stdout)))


@pytest.mark.parametrize("name", ["usdt.data", "trace/lost.dat", "fuzz/text/several.perf.txt"])
def test_by_hand(name: str, tmp_path: Path) -> None:
    """What somebody recorded by hand, as perf, trace-cmd or perf script wrote it."""
    bundle = tmp_path / "x.waitfold"
    options = ["--pg-version", "15.18"]
    if name != "usdt.data":
        options += ["--start", "*:w", "--value", "v"]
    made = waitfold("bundle", DATA / name, *options, "-o", bundle)
    assert made.returncode == 0, made.stderr
    assert figures(report(bundle)) == figures(report(DATA / name, *options))
    assert "leave out " in refusal("report", bundle, *options, status=2)
    assert "is a bundle already" in refusal("bundle", bundle, "-o", bundle, status=2)


def test_standard_input(tmp_path: Path) -> None:
    """A bundle is told by what is in it, however it comes: from a pipe, or unpacked to a tar."""
    bundle = bundled(DATA / "mixed", tmp_path)
    tar = tmp_path / "mixed.tar"
    tar.write_bytes(lzma.decompress(bundle.read_bytes()))
    assert report(tar) == report(bundle)
    piped = subprocess.run(
        [shutil.which("waitfold") or ".venv/bin/waitfold", "report", "--json", "-"],
        stdin=bundle.open("rb"), capture_output=True, check=True,
    )  # fmt: skip
    assert json.loads(piped.stdout) == report(bundle)


def test_what_is_in_it(tmp_path: Path) -> None:
    """Tar unpacks it; the reports in it are those of it, and what was removed is what was said."""
    answer = waitfold("bundle", DATA / "fuzz/all", "-o", tmp_path / "x.waitfold")
    subprocess.run(["tar", "xf", "x.waitfold"], cwd=tmp_path, check=True)
    bundle = tmp_path / "x.waitfold"
    assert json.loads((tmp_path / "report.json").read_text()) == report(bundle)
    text = waitfold("report", bundle).stdout.replace(str(bundle), "bundle.waitfold")
    assert (tmp_path / "report.txt").read_text() == text
    head, _, removed = answer.stdout.partition("\n")
    assert re.fullmatch(rf"{bundle}: \d+ kB, \d+ kB unpacked", head)
    assert (tmp_path / "removed.txt").read_text() == removed
    assert re.search(r"^  queries +[1-9]", removed, re.M)
    assert "stacks, by names of functions" in removed


def test_max(tmp_path: Path) -> None:
    """Rare stacks go first, then all; no figure of the report changes, and the least is asked."""
    bundle = tmp_path / "x.waitfold"
    whole = waitfold("bundle", DATA / "fuzz/all", "-o", bundle)
    size = bundle.stat().st_size
    figures = report(bundle)
    assert "Trimmed" not in whole.stdout
    rare = waitfold("bundle", DATA / "fuzz/all", "-o", bundle, "--max", str(size - 1))
    assert re.search(r"^Trimmed .*: \d+ of \d+ stacks, each seen once", rare.stdout, re.M)
    assert bundle.stat().st_size < size
    assert report(bundle) == figures
    assert "[trimmed]" in waitfold("fold", bundle, "--kind", "wall").stdout
    size = bundle.stat().st_size
    none = waitfold("bundle", DATA / "fuzz/all", "-o", bundle, "--max", f"{(size - 1) / 1000:.3f}K")
    assert re.search(r"^Trimmed .*: all stacks, \d+ samples", none.stdout, re.M)
    assert report(bundle) == figures
    assert "--with offcpu,oncpu" in refusal("report", bundle, "--audit", status=2)
    kept = bundle.read_bytes()
    said = refusal("bundle", DATA / "fuzz/all", "-o", bundle, "--max", "1K")
    allowed = re.search(r"or allow --max (\S+)\.$", said.strip())
    assert allowed and bundle.read_bytes() == kept
    assert waitfold("bundle", DATA / "fuzz/all", "-o", bundle, "--max", allowed[1]).returncode == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max", "5G"], "--max 5G: give a number of bytes, or one with K or M"),
        (["--keep", "everything"], "--keep everything: give one of queries, user"),
        (["-o", "-"], "name a file with -o"),
    ],
)
def test_called_wrongly(options: list[str], said: str, tmp_path: Path) -> None:
    """What is not understood is said, and nothing is written."""
    path = tmp_path / "x.waitfold"
    assert said in refusal("bundle", DATA / "mixed", "-o", path, *options, status=2)
    assert not list(tmp_path.iterdir())


# Literals


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SELECT 'it''s', t1.c2, 'b'", "SELECT ?, t1.c2, ?"),
        (r"SELECT E'\'', e'a\\', 'x'", "SELECT ?, ?, ?"),
        ("SELECT $a$ ' $b$ $a$, $$x$$, $1, $12", "SELECT ?, ?, $1, $12"),
        ("SELECT a$b$c$b$ FROM x$1", "SELECT a$b$c$b$ FROM x$1"),
        (r"SELECT U&'\0041', u&'x' UESCAPE '!'", "SELECT ?, ? UESCAPE ?"),
        ("SELECT B'01', X'1F', n'x', date '2020-01-01'", "SELECT ?, ?, ?, date ?"),
        ("SELECT 1, 1e5, 1E-5, .5, 5., 0x1F, 0b11, 0o17, 1_000", "SELECT " + ", ".join("?" * 9)),
        ("SELECT -1, a-1, a -1, a - -1, 1-1, (1)-1", "SELECT ?, a-?, a ?, a - ?, ?-?, (?)-?"),
        ('SELECT "a""b\'1", U&"d\\0061t1" FROM "x', 'SELECT "a""b\'1", U&"d\\0061t1" FROM "x'),
        ("SELECT /* a /* b */ 'c' */ 1 -- d 'e'\n, 2", "SELECT   ?  \n, ?"),
        ("SELECT 1/* a", "SELECT ? "),
        ("SELECT t.c1::numeric(10, 2), '1'::int", "SELECT t.c1::numeric(?, ?), ?::int"),
        ("SELECT 'cut off", "SELECT ?"),
        ("SELECT E'cut off\\", "SELECT ?"),
        ("SELECT $tag$ cut $ta", "SELECT ?"),
        ("SELECT $cu", "SELECT ?"),
        ("SELECT x FROM t WHERE größe1 = 1", "SELECT x FROM t WHERE größe1 = ?"),
        ("SELECT é$1, $ü$ ü $ü$", "SELECT é$1, ?"),
        (r"SELECT 'a\', secret, 'b'", "SELECT ?"),
        (r"SELECT 'a\\', c, 'b\n'", "SELECT ?, c, ?"),
        ("SELECT 1E'a\\'secret' ", "SELECT ??"),
    ],
)  # fmt: skip
def test_literals(text: str, expected: str) -> None:
    """Literals and comments go by the rules of PostgreSQL's scanner; names and parameters stay."""
    assert without_literals(text)[0] == expected
    assert without_literals(expected)[0] == expected
    assert shape(expected) == shape(text)


SECRET = "ЖЮ7Щ"  # of characters that nothing else has


def secret_sql(rng: random.Random) -> str:
    """A statement of which all but the letters a to z and the digits 1 to 3 is secret."""
    secret = "".join(rng.choice(SECRET) for _ in range(rng.randrange(1, 9)))
    quote = rng.choice(("''", "", "-- ", "/*", '"', "$$", "$1"))
    parts: list[Callable[[], str]] = [
        lambda: f"'{secret}{quote}{secret}'",
        lambda: f"E'{secret}\\'{secret}\\\\'",
        lambda: f"$a1${secret}'{quote}{secret}$a1$",
        lambda: f"$$ {secret} $a$ {secret}$$",
        lambda: f"U&'{secret}'",
        lambda: f"B'{secret}' || x'{secret}'",
        lambda: f"/* {secret} /* ' */ {secret}'{quote.replace('/*', '')}*/",
        lambda: f"-- {secret}'{secret}\n",
        lambda: "777.7e-77",
        lambda: "-7",
        lambda: "ab12.c3",
        lambda: '"a""1\'b"',
        lambda: "$1",
        lambda: "a$b$c",
        lambda: "x::text[1]",
        lambda: "- + / <> *",
    ]
    return " ".join(rng.choice(parts)() for _ in range(rng.randrange(1, 12)))


def test_generated_literals() -> None:
    """Nothing of a literal is left of generated statements, wherever they are cut."""
    rng = random.Random(5)
    for _ in range(1000):
        text = secret_sql(rng)
        for end in {len(text), *rng.sample(range(len(text)), min(9, len(text)))}:
            cleaned, _ = without_literals(text[:end])
            assert not set(cleaned) & set(SECRET), text[:end]
            assert without_literals(cleaned)[0] == cleaned


def test_long_text() -> None:
    """A text of a hundred thousand characters takes no longer than it must."""
    for part in ("''", "/*", "$a", '"', "1", "a1$", "\\'", "$$", "e'", "-"):
        text = f"SELECT {part * 50_000}"
        assert len(without_literals(text)[0]) <= len(text)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        ("ExecScan", "ExecScan"),
        ("[unknown]", "[unknown]"),
        ("[postgres+0x12af]", "[postgres+0x12af]"),
        ("[libc.so.6+0x1f]", "[libc.so.6+0x1f]"),
        ("[libsecret.so.1+0x1f]", "[file-1+0x1f]"),
        ("[libsecret.so.1]", "[file-1]"),
        ("[other.so]", "[file-2]"),
        ("[kernel.kallsyms+0xffffffff81000000]", "[kernel.kallsyms+address-1]"),
        ("[perf-77.map+0x7f0000001000]", "[perf-77.map+address-2]"),
    ],
)
def test_frames(frame: str, expected: str) -> None:
    """Functions keep their names, files that many hosts have theirs; addresses are numbered."""
    redactor = Redactor([])
    for earlier in ("[libsecret.so.1]", "[other.so]", "[kernel.kallsyms+0xffffffff81000000]"):
        redactor.frame(earlier)
    assert redactor.frame(frame) == expected
    assert Redactor(KINDS).frame(frame) == frame


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/srv/secret/cap/perf.data was cut short", "perf.data was cut short"),
        ("/srv/secret/cap was cut", "the capture was cut"),
        ("at /srv/secret/capital/x, before 0x7ffd00001000", "at [path], before [address]"),
        ("the recorder was killed", "the recorder was killed"),
    ],
)  # fmt: skip
def test_warnings(text: str, expected: str) -> None:
    """What waitfold itself says of a capture names no path."""
    assert Redactor([]).warning(text, "/srv/secret/cap") == expected
    assert Redactor(KINDS).warning(text, "/srv/secret/cap") == text


# Nothing of what was to be removed: 1,000 literals, names and paths in a recording of a server

LITERALS = """'{}'|E'{}\\'s'|$${}$$|$t1${}$t1$|U&'{}'|N'{}'|X'{}'|B'{}'|{}.5e3|-{}|/* {} */ 1
|1 -- {}
|/* /* {} */ {} */ 2|'it''s {}'|'{}' '{}'|($q$'{}'$q$::text)"""


class Secrets:
    """Words and numbers that occur nowhere else."""

    def __init__(self) -> None:
        self._rng = random.Random(6)
        self.all: list[str] = []

    def word(self) -> str:
        """A word."""
        letters = "bcdfghjklmnpqrstvwxz"
        self.all.append("zq" + "".join(self._rng.choice(letters) for _ in range(10)))
        return self.all[-1]

    def number(self) -> str:
        """A number that is no time."""
        self.all.append("8" + "".join(self._rng.choice("0123456789") for _ in range(15)))
        return self.all[-1]

    def literal(self) -> str:
        """A literal or a comment."""
        form = self._rng.choice(LITERALS.split("|"))
        numeric = form in ("{}.5e3", "-{}", "X'{}'", "B'{}'")
        return re.sub(r"\{\}", lambda _: self.number() if numeric else self.word(), form)


@pytest.fixture(scope="module")
def planted(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A recording of a server on which 1,000 things are secret, and these."""
    secrets = Secrets()
    word = secrets.word
    users, databases = [word() for _ in range(12)], [word() for _ in range(4)]
    owner = Connection(cluster)
    for name in users:
        owner.query(f"CREATE ROLE {name} SUPERUSER LOGIN")
    for name in databases:
        owner.query(f"CREATE DATABASE {name} TEMPLATE template0")
    capture = tmp_path_factory.mktemp(word()) / word()
    connections = [
        Connection(cluster, user=user, database=databases[i % 4], application_name=word())
        for i, user in enumerate(users)
    ]
    waiting = connections[0]
    waiting.send((b"Q", f"SELECT pg_sleep(0.4), '{word()}', '{word()}".encode() + b"'\0"))
    recorder = Recorder("--engine", "perf", "-D", cluster.data, "--with", "all", "-o", capture)
    waiting.wait()
    while len(secrets.all) < 1000:
        for one in connections:
            one.query(f"SELECT {', '.join(secrets.literal() for _ in range(4))} FROM pg_class t1")
    connections[1].query(f"ALTER ROLE {users[1]} PASSWORD '{word()}'")
    connections[2].query(f"SELECT '{word()} cut off")
    connections[3].query(f"SELECT 1 FROM {word()}; SET application_name TO '{word()}'")
    del secrets.all[-2]  # an identifier, which remains
    new = Connection(cluster, user=users[3], database=databases[3], application_name=word())
    new.query(f"SELECT pg_sleep(0.01) /* {word()} */")
    assert recorder.end() == 0, recorder.said
    for one in (*connections, new):
        one.close()
    for name in databases:
        owner.query(f"DROP DATABASE {name} (FORCE)")
    for name in users:
        owner.query(f"DROP ROLE {name}")
    owner.close()
    _plant(capture, secrets)
    return capture, secrets.all


def _plant(capture: Path, secrets: Secrets) -> None:
    """Plant what this host does not have: other names of it, remote clients, strange libraries."""
    word = secrets.word
    told = manifest(capture)
    told |= {
        "host": f"{word()}.example", "kernel": f"6.1.7-{word()}", "binary": f"/opt/{word()}/pg",
        "command": f"waitfold-record -D /srv/{word()} -- psql -c \"SELECT '{word()}'\"",
        "comm": word(), "strange": word(), "perf": f"perf version 6.1.g{word()}",
    }  # fmt: skip
    (capture / "manifest").write_text("".join(f"{k}\t{v}\n" for k, v in told.items()))
    backends = (capture / "backends.tsv").read_text()
    remote = backends.replace("[local]", f"{word()}.example(5432)")
    (capture / "backends.tsv").write_text(remote.replace("postgres: ", f"postgres: {word()}: "))
    index = capture / "symbols" / "index.tsv"
    index.write_text(index.read_text().replace("/usr/lib/", f"/opt/{word()}/"))
    with (capture / "perf.log").open("a") as log:
        log.write(f"/home/{word()}/x\n")
    query = capture / "query.set"
    query.write_text(f"# {word()}\n{query.read_text()}")


def encodings(secret: str) -> Iterator[bytes]:
    """The bytes that a text may be found as, in small letters where that says no less."""
    plain = secret.encode()
    yield plain
    yield plain[::-1]
    yield codecs.encode(secret, "rot13").encode()
    for own in (plain, secret.encode("utf-16-le"), secret.encode("utf-16-be")):
        yield own
        yield own.hex().encode()
    yield secret.encode("utf-32-le")
    for offset in range(3):
        # Without what depends on what stands before and behind.
        code = base64.b64encode(b"\0" * offset + plain)
        yield code[4 if offset else 0 : -4].lower()
    yield "".join(f"%{byte:02x}" for byte in plain).encode()
    yield "".join(f"\\u{byte:04x}" for byte in plain).encode()
    yield "".join(f"&#{byte};" for byte in plain).encode()
    yield html.escape(urllib.parse.quote(secret)).encode()
    if secret.isdecimal():
        for order in "<>":
            yield struct.pack(f"{order}Q", int(secret))
            yield struct.pack(f"{order}d", float(secret))
        yield f"{int(secret):x}".encode()


def everything(bundle: Path) -> bytes:
    """All bytes of a bundle, unpacked, and what its columns hold at any width."""
    content = lzma.decompress(bundle.read_bytes())
    parts = [bundle.read_bytes(), content]
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            if member.name.endswith(".npy"):
                column = np.load(io.BytesIO(file.read()), allow_pickle=False)
                every = (column, np.cumsum(column), column.astype("i8"), column.astype("u1"))
                parts += [one.tobytes() for one in every]
    return b"\0".join(parts)


def within(content: bytes, codes: list[bytes]) -> list[bytes]:
    """Those of some codes that are in a content, of which each has 8 bytes or more."""
    assert min(map(len, codes)) >= 8
    views = [
        np.frombuffer(content, "<u8", (len(content) - offset) // 8, offset) for offset in range(8)
    ]
    heads = np.array([int.from_bytes(code[:8], "little") for code in codes], np.uint64)
    likely = np.flatnonzero(np.isin(heads, np.unique(np.concatenate(views))))
    return [codes[i] for i in likely.tolist() if codes[i] in content]


def test_redaction(planted: tuple[Path, list[str]], tmp_path: Path) -> None:
    """None of 1,000 secrets is found in any encoding; all of them are where they were kept."""
    capture, secrets = planted
    assert len(secrets) == len(set(secrets)) >= 1000
    found = everything(bundled(capture, tmp_path))
    codes = [code for secret in secrets for code in encodings(secret)]
    assert not within(found, codes) + within(found.lower(), codes)
    # The search finds what is there: of what was kept most, as some is in no bundle at all.
    kept = everything(bundled(capture, tmp_path, *KEEP_ALL)).lower()
    assert len(within(kept, [secret.encode() for secret in secrets])) > 900


def test_figures_of_redacted(planted: tuple[Path, list[str]], tmp_path: Path) -> None:
    """The report in JSON is the same but for names, and so is each dimension's accounting."""
    capture, _ = planted
    bundle = bundled(capture, tmp_path)
    one, other = report(capture), report(bundle)
    assert figures(one) == figures(other)
    for kind in ("user", "database", "application"):
        own, theirs = (
            [process[kind] for process in told["accounting"]["processes"]] for told in (one, other)
        )
        pseudonyms = dict(zip(own, theirs, strict=True))
        assert len(set(pseudonyms.values())) == len(pseudonyms) > 3
        assert [pseudonyms[name] for name in own] == theirs
    before, after = (account(join(open_capture(p, Naming()))) for p in (capture, bundle))
    for dimension in ("database", "user", "application", "query", "event", "backend"):
        first, second = (
            sorted((r.busy, r.idle_ns, r.in_transaction_ns) for r in own.by([dimension], own.cells))
            for own in (before, after)
        )
        assert first == second and len(first) > 2, dimension
    for kind in ("oncpu", "offcpu", "wall"):
        one_ns, other_ns = (folded_ns(path, kind) for path in (capture, bundle))
        assert one_ns == other_ns > 0


def folded_ns(capture: Path, kind: str) -> int:
    """The time of all stacks of a kind."""
    lines = waitfold("fold", capture, "--kind", kind).stdout.splitlines()
    return sum(int(line.rpartition(" ")[2]) for line in lines)


NAMES = ("user", "database", "application", "text", "query_id")


def figures(part: Any) -> Any:
    """A report without names of users and the like, and without what queries are called."""
    if isinstance(part, list):
        return [figures(one) for one in part]
    if isinstance(part, dict):
        left_out = NAMES if "class" in part else (*NAMES, "name", "fields")
        return {key: figures(one) for key, one in part.items() if key not in left_out}
    return part


# Archives that harm


def archived(*members: tarfile.TarInfo, form: int = tarfile.USTAR_FORMAT) -> bytes:
    """A tar that begins as a bundle does, and has these members."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=form) as tar:
        for member in (named("manifest"), *members):
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return raw.getvalue()


def named(name: str, **more: Any) -> tarfile.TarInfo:
    """A member of a tar."""
    member = tarfile.TarInfo(name)
    for key, value in more.items():
        setattr(member, key, value)
    return member


def with_header(at: int, content: bytes) -> bytes:
    """An archive with something else in the header of its second member, its checksum right."""
    own = bytearray(archived(named("report.txt", size=600)))
    own[512 + at : 512 + at + len(content)] = content
    own[512 + 148 : 512 + 156] = b" " * 8
    own[512 + 148 : 512 + 156] = b"%06o\0 " % sum(own[512:1024])
    return bytes(own)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (archived(named("../report.txt")), "'../report.txt' leads out of its folder"),
        (archived(named("a/../../b")), "leads out of its folder"),
        (archived(named("/etc/cron.d/x")), "is no name within a folder"),
        (archived(named("report.txt", type=b"2", linkname="/etc/passwd")), "a symbolic link"),
        (archived(named("report.txt", type=tarfile.LNKTYPE, linkname="manifest")), "a hard link"),
        (archived(named("report.txt", type=tarfile.CHRTYPE)), "a device"),
        (archived(named("report.txt", type=tarfile.FIFOTYPE)), "a pipe"),
        (archived(named("report.txt", type=tarfile.DIRTYPE)), "a folder"),
        (
            archived(named("report.txt", pax_headers={"path": "../x"}), form=tarfile.PAX_FORMAT),
            "an extension of tar",
        ),
        (archived(named("x" * 200), form=tarfile.GNU_FORMAT), "is a tar"),
        (archived(named("evil.sh")), "it has a member 'evil.sh'"),
        (archived(named("sub/report.txt")), "it has a member 'sub/report.txt'"),
        (archived(named("report.txt"), named("report.txt")), "it has two members 'report.txt'"),
        (archived(*(named(f"s{i}.set") for i in range(600))), "more than 512 members"),
        (archived()[:-1] + b"x", "something stands behind its end"),
        (archived()[:512], "it was cut short"),
        (archived()[:700], "it was cut short"),
        (archived(named("report.txt", size=5000))[:3000], "'report.txt' should have 5000 bytes"),
        (with_header(124, b"77777777777\0"), "should have 8589934591 bytes"),
        (with_header(124, b"-0000001234\0"), "does not fit its checksum"),
        (with_header(124, b"\x80" + bytes(10) + b"\x01"), "holds no numbers"),
        (with_header(257, b"nothing"), "is none of a tar"),
        (with_header(345, b"/etc"), "is no name within a folder"),
        (with_header(0, b"\xff\xfe\x1b[31m\n"), "it has a member"),
    ],
)  # fmt: skip
def test_harmful_archives(content: bytes, said: str, tmp_path: Path) -> None:
    """What no bundle has is refused in one line, and nothing is written anywhere."""
    bundle = tmp_path / "inner" / "x.waitfold"
    bundle.parent.mkdir()
    for packed in (content, lzma.compress(content, preset=0)):
        bundle.write_bytes(packed)
        assert said in refusal("report", bundle)
    assert list(tmp_path.rglob("*")) == [bundle.parent, bundle]


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What unpacks to a thousand times its size is refused, or to more than a bundle may have."""
    bundle = tmp_path / "x.waitfold"
    zeros = archived(named("report.txt", size=20 << 20))
    bundle.write_bytes(lzma.compress(zeros, preset=0))
    monkeypatch.setattr(inputs, "RATIO_FREE", 1 << 20)
    assert f"unpacks to more than {inputs.RATIO_MAX} times its size" in refusal("report", bundle)
    monkeypatch.setattr(archive, "MAX", 1 << 20)
    bundle.write_bytes(zeros)
    assert "it unpacks to more than 1 MiB" in refusal("report", bundle)
    assert "holds at most 1 MiB" in refusal("bundle", DATA / "mixed", "-o", bundle)


def test_cut_anywhere(tmp_path: Path) -> None:
    """A bundle that was cut, or in which a byte changed, is not read."""
    whole = bundled(DATA / "sets", tmp_path).read_bytes()
    rng = random.Random(7)
    bundle = tmp_path / "y.waitfold"
    for _ in range(12):
        end = rng.randrange(1, len(whole))
        bundle.write_bytes(whole[:end])
        assert "Traceback" not in refusal("report", bundle)
        other = bytearray(whole)
        other[rng.randrange(len(other))] ^= 1 << rng.randrange(8)
        bundle.write_bytes(other)
        refusal("report", bundle)
