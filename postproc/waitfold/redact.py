"""What must not leave the host: literals out of queries, names made pseudonyms."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from functools import cached_property

KINDS = {
    "queries": "literals and comments in the texts of queries, and the queries' ids",
    "user": "names of users",
    "database": "names of databases",
    "application": "application names",
    "host": "the host's name, and of its kernel all but the version number",
    "paths": "the server's binary, other binaries but PostgreSQL's and the system's, files",
    "command": "the command that recorded",
    "addresses": "addresses in memory that have no name",
    "texts": "texts in probe sets that waitfold does not know",
}
"""What is removed unless it is to be kept."""

_HIGH = "\x80-\U0010ffff"
# The parts of SQL that matter here, by the rules of PostgreSQL's src/backend/parser/scan.l. Of what
# a text was cut in, all to its end belongs to it.
_TOKEN = rf"""
      (?P<comment> --[^\n\r]*+ )
    | (?P<nested> /\* )
    | (?P<escaped> [eE]'(?:[^'\\]|\\.|'')*+(?:'|\\?\Z) )
    | (?P<string> (?:[uU]&|[bBxXnN])?'(?:[^']|'')*+(?:'|\Z) )
    | (?P<dollar> \$(?P<tag>(?:[A-Za-z_{_HIGH}][A-Za-z0-9_{_HIGH}]*+)?)
        (?:\$.*?(?:\$(?P=tag)\$|\Z)|\Z) )
    | (?P<kept> "(?:[^"]|"")*+"? | \$[0-9]+ | [A-Za-z_{_HIGH}][A-Za-z0-9_${_HIGH}]*+ )
    | (?P<number> (?:(?<![^\s(,=<>+*/%^|&~!@\#?:;\[-])-)?\.?[0-9](?:[eE][+-](?=[0-9])|[\w.])*+ )
    """
# How far a string goes where standard_conforming_strings is off.
_ESCAPED = re.compile(r"(?:[^'\\]|\\.|'')*+(?:'|\\?\Z)", re.DOTALL)
_EITHER = re.compile(r"/\*|\*/")


def without_literals(text: str) -> tuple[str, int]:
    """Return a query with `?` for its literals and a blank for its comments; how many there were.

    Any text will do, also one that was cut. A minus that stands before a number is a part of it
    unless it follows an operand at once. Where a string's end depends on the server's
    standard_conforming_strings, all that follows counts as a literal.
    """
    parts: list[str] = []
    found = at = 0
    # Compiled at the first text, and then known to re: no start-up has to wait for it.
    token = re.compile(_TOKEN, re.VERBOSE | re.DOTALL)
    while match := token.search(text, at):
        kind = match.lastgroup if match.lastgroup != "tag" else "dollar"
        start, end = match.span()
        if kind == "kept":
            parts.append(text[at:end])
            at = end
            continue
        if kind == "nested":
            end = _comment_end(text, end)
        elif kind == "string":
            quote = text.index("'", start)
            other = _ESCAPED.match(text, quote + 1)
            if other is None or other.end() != end:
                end = len(text)
        parts += [text[at:start], " " if kind in ("comment", "nested") else "?"]
        found += 1
        at = end
    parts.append(text[at:])
    return "".join(parts), found


def _comment_end(text: str, at: int) -> int:
    """Return where a comment ends that began before `at`; they nest."""
    depth = 1
    while depth and (match := _EITHER.search(text, at)):
        depth += 1 if match[0] == "/*" else -1
        at = match.end()
    return len(text) if depth else at


# Binaries that nobody in particular has: PostgreSQL's own, what it is linked with, the kernel's.
_LIBRARIES = (
    "LLVM|acl|anl|audit|blkid|brotli|bz2|c|cap|cap-ng|com_err|crypt|crypto|curl|dl|ecpg|edit|expat"
    "|ffi|gcc_s|gcrypt|gmp|gnutls|gpg-error|gssapi_krb5|hogweed|icudata|icui18n|icuuc|idn2"
    "|k5crypto|keyutils|krb5|krb5support|lber|ldap|lz4|lzma|m|md4c|mvec|ncurses|nettle|nsl|nss"
    "|numa|p11-kit|pam|pcre|perl|pgcommon|pgport|pgtypes|pq|pqwalreceiver|pthread|python|readline"
    "|resolv|rt|sasl2|selinux|ssl|stdc\\+\\+|systemd|tasn1|tinfo|udev|unistring|uring|uuid|xml2"
    "|xslt|z|zstd"
)
_MODULES = (
    "amcheck|auth_delay|auto_explain|basebackup_to_shell|basic_archive|bloom|btree_gin|btree_gist"
    "|citext|cube|dblink|dict_int|dict_snowball|dict_xsyn|earthdistance|file_fdw|fuzzystrmatch"
    "|hstore|intarray|isn|jsonb_plperl|jsonb_plpython3|lo|ltree|llvmjit|old_snapshot|pageinspect"
    "|passwordcheck|pg_buffercache|pg_freespacemap|pg_logicalinspect|pg_overexplain|pg_prewarm"
    "|pg_stat_statements|pg_surgery|pg_trgm|pg_visibility|pg_walinspect|pgcrypto|pgoutput"
    "|pgrowlocks|pgstattuple|pgxml|plperl|plpgsql|plpython3|pltcl|postgres_fdw|seg|sepgsql|sslinfo"
    "|tablefunc|tcn|test_decoding|tsm_system_rows|tsm_system_time|unaccent|uuid-ossp"
)
_KNOWN_BINARY = re.compile(
    rf"postgres|postmaster|vdso|kernel\.kallsyms|unknown|trimmed|ld(-linux)?[-\w]*\.so[.0-9]*"
    rf"|lib({_LIBRARIES})[-.0-9]*\.so[.0-9]*|({_MODULES})\.so|perf-[0-9]+\.map"
)
_FRAME = re.compile(r"\[+(.*?)\]*(?:\+0x([0-9a-f]+))?\]", re.DOTALL)
_KERNEL_HALF = 1 << 63
_ADDRESS = re.compile(r"0x[0-9a-f]{9,16}")
_PATH = re.compile(r"(?<![\w.<])/[^\s:;,'\"]+")


_TOLD = ("user", "database", "application", "host")
"""Whose names are looked for in texts."""


class Redactor:
    """Removes what is not to be kept, and counts it.

    A name's pseudonym is the same wherever it stands, as database-1. So that it is found in the
    texts of queries too, names must be told by `name` before the texts are asked for.
    """

    def __init__(self, keep: Collection[str]) -> None:
        self.keep = frozenset(keep)
        self.counts: Counter[str] = Counter()
        self._names: dict[tuple[str, str], str] = {}
        self._numbers: Counter[str] = Counter()

    def name(self, kind: str, text: str, called: str = "") -> str:
        """Return a pseudonym of a name, `called` and a number; an empty one stays."""
        if kind in self.keep or not text:
            return text
        called = called or kind
        if (called, text) not in self._names:
            self.counts[kind] += 1
            self._numbers[called] += 1
            self._names[called, text] = f"{called}-{self._numbers[called]}"
        return self._names[called, text]

    def number(self, kind: str, value: int) -> int:
        """Return a number for an id, 0 for 0."""
        if kind in self.keep or not value:
            return value
        return int(self.name(kind, f"id {value}", "id").removeprefix("id-"))

    def query(self, text: str) -> str:
        """Return a query without literals, and with pseudonyms for the names that were told."""
        if "queries" not in self.keep:
            text, found = without_literals(text)
            self.counts["queries"] += found
        return self.text(text)

    def text(self, text: str) -> str:
        """Return a text with pseudonyms for the names that were told."""
        names, pattern = self._in_texts
        return pattern.sub(lambda m: names.get(m[0].lower(), "?"), text) if names else text

    @cached_property
    def _in_texts(self) -> tuple[dict[str, str], re.Pattern[str]]:
        names = {
            name.lower(): pseudonym
            for (called, name), pseudonym in self._names.items()
            if called in _TOLD
        }
        words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        return names, re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)

    def frame(self, name: str) -> str:
        """Return a frame of a stack; a function's name stays, a file's if many have that."""
        match = _FRAME.fullmatch(name)
        if match is None:
            return name
        file, offset = match[1], match[2]
        known = _KNOWN_BINARY.fullmatch(file)
        if not known:
            file = self.name("paths", file, "file")
        if offset is None:
            return f"[{file}]"
        if int(offset, 16) >= _KERNEL_HALF or file.startswith("perf-"):
            return f"[{file}+{self.name('addresses', '0x' + offset, 'address')}]"
        return f"[{file}+0x{offset}]"

    def warning(self, text: str, path: str) -> str:
        """Return one of waitfold's own messages about the capture `path`, or a file in it."""
        if "paths" not in self.keep:
            own = rf"(?<![\w/.-]){re.escape(path)}(?:(/)|(?![\w-]))"
            text = re.sub(own, lambda match: "" if match[1] else "the capture", text)
            text = _PATH.sub("[path]", text)
        if "addresses" not in self.keep:
            text = _ADDRESS.sub("[address]", text)
        return self.text(text)
