"""waitfold report --html, in a browser: what it shows, what it does, and what it never does."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, waitfold
from playwright.sync_api import Browser, Page, sync_playwright

from waitfold.account import report_of
from waitfold.capture import Naming, open_capture
from waitfold.cli import main
from waitfold.queries import Query
from waitfold.show.flames import NODES_MAX, Graphs, _tree
from waitfold.show.html import page
from waitfold.show.markup import TEXT_MAX, visible

MIXED = ROOT / "tests/data/mixed"
SAMPLE = ROOT / "samples/lock-contention/lock-contention.waitfold"
MARKUP = '</script></style><script>alert(1)</script><img src=x onerror=alert(2)>"&amp;`'
HOSTILE = f"{MARKUP}\x1b[31m\u202e\u2066\u200b\ufeff\x7f"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes the page of a capture, once."""

    @cache
    def make(capture: Path, *named: str) -> Path:
        file = tmp_path_factory.mktemp("html") / "page.html"
        assert main(["report", str(capture), *named, "--html", str(file)]) == 0
        return file

    return make


@pytest.fixture(scope="module")
def made(page_of: Callable[..., Path]) -> Path:
    """The page of a capture with all that can be recorded."""
    return page_of(SAMPLE)


class Shown:
    """A page in the browser, and what must not happen there."""

    def __init__(self, browser: Browser, file: Path, **options: Any) -> None:
        self.said: list[str] = []
        self.fetched: list[str] = []
        self.refused: list[str] = []
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.fetched.append(request.url))
        self.page.on("requestfailed", lambda request: self.refused.append(str(request.failure)))
        self.page.goto(file.as_uri())

    def close(self) -> None:
        """Close it; nothing was complained about, and nothing fetched but the file."""
        self.context.close()
        assert self.said == []
        assert len(self.fetched) == 1


@pytest.fixture
def shown(browser: Browser, made: Path) -> Iterator[Page]:
    """The page of the sample, with its script."""
    shown = Shown(browser, made)
    yield shown.page
    shown.close()


def column(page: Page, caption: str, number: int) -> list[str]:
    """The cells of a column of a table, of the rows that are shown."""
    cells: list[str] = page.evaluate(
        """([caption, number]) => {
            const tables = [...document.querySelectorAll(".table > table")];
            const table = tables.find((t) => t.caption.textContent.startsWith(caption));
            return [...table.tBodies[0].rows].filter((row) => row.checkVisibility())
                .map((row) => row.cells[number].dataset.v ?? row.cells[number].textContent);
        }""",
        [caption, number],
    )
    return cells


def table(page: Page, caption: str) -> Any:
    """A table and what is around it."""
    return page.locator(".table", has=page.locator("caption", has_text=caption)).first


def rows_of(text: str) -> set[str]:
    """The rows of the tables in a report as text, but those of queries."""
    rows, name = set(), ""
    for line in text.partition("\n\n")[2].partition("\nquery: ")[0].splitlines():
        words = line.split()
        if not words or not re.search(r"\d(ns|us|ms|s|h)\b", line) or line.startswith("Residual"):
            name = line.strip()
        else:
            rows.add(" ".join([*(name.split() if line.startswith("    ") else []), *words]))
    return rows


@pytest.mark.parametrize(
    ("capture", "by", "named"),
    [
        (SAMPLE, [], []),
        (SAMPLE, ["--by", "backend"], []),
        (MIXED, [], []),
        (MIXED, ["--by", "database"], []),
        (ROOT / "tests/data/usdt.data", [], ["--pg-version", "15.18"]),
    ],
)
def test_figures_are_those_of_the_report(
    browser: Browser,
    page_of: Callable[..., Path],
    capture: Path,
    by: list[str],
    named: list[str],
) -> None:
    """All rows of the report's tables stand in the page, which shows them without its script."""
    report = waitfold("report", capture, *named, *by).stdout
    shown = Shown(browser, page_of(capture, *named), java_script_enabled=False)
    # A space for each tab, and none for what a row has no figure of.
    rows = {" ".join(row.split()) for row in shown.page.locator("tr").all_inner_texts()}
    expected = {row for row in rows_of(report) if not row.startswith("= wall")}
    assert expected and expected - rows == set()
    facts = dict(
        zip(
            shown.page.locator("#summary dt").all_inner_texts(),
            shown.page.locator("#summary dd").all_inner_texts(),
            strict=True,
        )
    )
    head = report.partition("\n\n")[2].partition("\n\n")[0]
    assert " ".join(head.split()).startswith(" ".join(" ".join(f) for f in facts.items()))
    assert shown.page.locator("#caveats li").count() > 2
    shown.close()


def test_sort(shown: Page) -> None:
    """A head sorts its table, by figures the greatest first, and a second time the other way."""
    caption = "All the time of client"
    head = table(shown, caption).locator("thead th", has_text="on-CPU")
    assert head.get_attribute("aria-sort") is None
    for way in (-1, 1):
        head.get_by_role("button").click()
        values = [way * int(cell) for cell in column(shown, caption, 5)]
        assert len(values) > 3 and values == sorted(values)
        assert head.get_attribute("aria-sort") == {-1: "descending", 1: "ascending"}[way]
    table(shown, caption).get_by_role("button", name="wait event").click()
    names = [cell.lower() for cell in column(shown, caption, 0)]
    assert names == sorted(names)
    assert table(shown, caption).locator("thead [aria-sort]").count() == 1
    sums = table(shown, caption).locator("tfoot th").all_inner_texts()
    assert sums[0] == "= DB time" and sums[-1] == "= wall time"


def test_filter(shown: Page) -> None:
    """What is typed leaves the rows that hold it, and says how many."""
    caption = "All the time of client"
    before = column(shown, caption, 0)
    field = shown.get_by_label(f"Filter rows of: {caption}")
    field.fill("LOCK:")
    after = column(shown, caption, 0)
    assert 0 < len(after) < len(before)
    assert all("lock:" in name.lower() for name in after)
    assert shown.get_by_text(f"{len(after)} of {len(before)} rows").is_visible()
    shown.emulate_media(media="print")
    assert column(shown, caption, 0) == before
    shown.emulate_media(media="screen")
    field.fill("")
    assert column(shown, caption, 0) == before


def flame(page: Page, key: str = "wall") -> Any:
    """A flame graph."""
    return page.locator(f'.flame[data-graph="{key}"]')


def test_flame_graphs(shown: Page) -> None:
    """A frame clicked on is as wide as the graph, until one zooms out; a search marks frames."""
    for key in ("waits", "oncpu", "offcpu", "wall"):
        assert flame(shown, key).locator("rect").count() > 3
    graph = flame(shown)
    whole = float(graph.locator('rect[data-i="0"]').get_attribute("width"))
    frame = graph.locator("rect", has_not=shown.locator("[data-i='0']")).last
    number = frame.get_attribute("data-i")
    narrow = float(frame.get_attribute("width"))
    frame.click()
    wide = graph.locator(f'rect[data-i="{number}"]')
    assert float(wide.get_attribute("width")) == whole > narrow
    assert "of the zoomed" in graph.locator(".status").inner_text()
    graph.get_by_role("button", name="Zoom out").click()
    assert float(wide.get_attribute("width")) == narrow
    assert graph.get_by_role("button", name="Zoom out").is_disabled()
    graph.get_by_role("searchbox").fill("LOCK:TRANSACTION")
    assert graph.locator("rect.hit").count() > 0
    assert re.fullmatch(
        r"[1-9]\d* frames, [\d.]+m?s, [\d.]+ %", graph.locator("output").inner_text()
    )
    graph.get_by_role("searchbox").fill("no such frame")
    assert graph.locator("rect.hit").count() == 0


def test_flame_graphs_are_folded_stacks(shown: Page) -> None:
    """The time of a flame graph is that of waitfold fold, as its figures are."""
    for key, options in (
        ("waits", []),
        ("offcpu", ["--kind", "offcpu", "--event"]),
        ("wall", ["--kind", "wall", "--event"]),
    ):
        folded = waitfold("fold", SAMPLE, *options).stdout.splitlines()
        total = sum(int(line.rpartition(" ")[2]) for line in folded)
        status = flame(shown, key).locator(".status").inner_text()
        seconds = float(re.fullmatch(r"all: ([\d.]+)s, 100 %", status)[1])  # type: ignore[index]
        assert seconds == pytest.approx(total / 1e9, rel=0.005)


def test_keyboard(shown: Page) -> None:
    """All can be reached and used by keyboard, and what has the focus is seen."""
    shown.keyboard.press("Tab")
    skip = shown.get_by_text("Skip to the report")
    assert skip.evaluate("e => e === document.activeElement && e.getBoundingClientRect().x >= 0")
    shown.keyboard.press("Enter")
    assert shown.evaluate("document.activeElement.id") == "main"
    seen = set()
    for _ in range(12):
        shown.keyboard.press("Tab")
        style = "getComputedStyle(document.activeElement)"
        assert shown.evaluate(f"{style}.outlineStyle + {style}.outlineWidth") == "solid2px"
        seen.add(shown.evaluate("document.activeElement.tagName"))
    assert {"INPUT", "BUTTON"} <= seen
    head = table(shown, "All the time of client").get_by_role("button", name="blocked")
    head.focus()
    shown.keyboard.press("Enter")
    assert head.locator("..").get_attribute("aria-sort") == "descending"
    graph, status = flame(shown), flame(shown).locator(".status")
    graph.locator("svg").focus()
    for key in ("ArrowUp", "ArrowUp", "ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp", "Enter"):
        shown.keyboard.press(key)
    assert "100 % of the zoomed" in status.inner_text()
    shown.keyboard.press("Escape")
    assert status.inner_text().startswith("all:")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme(browser: Browser, made: Path, scheme: Any) -> None:
    """The theme is the system's until one chooses; all text has contrast; paper is light."""
    shown = Shown(browser, made, color_scheme=scheme)
    ground = "getComputedStyle(document.body).backgroundColor"
    grounds = {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 22, 22)"}
    other = {"light": "dark", "dark": "light"}[scheme]
    for theme in (scheme, other):
        assert shown.page.evaluate(ground) == grounds[theme]
        shown.page.locator("#theme").click()
    assert shown.page.evaluate(ground) == grounds[scheme]
    assert shown.page.evaluate(CONTRAST) >= 4.5
    shown.page.emulate_media(media="print")
    assert shown.page.evaluate(ground) == grounds["light"]
    assert not shown.page.locator(".tools").first.is_visible()
    shown.close()


# The least contrast (WCAG 2.2) of any element with text of its own and the ground below it.
CONTRAST = """() => {
    const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => channels(colour).slice(0, 3).map((c) => c / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (e) => {
        const colour = getComputedStyle(e).backgroundColor;
        return !e.parentElement || (channels(colour)[3] ?? 1) ? colour : ground(e.parentElement);
    };
    let least = 21;
    for (const e of document.querySelectorAll("body *:not(script):not(noscript):not(svg *)")) {
        if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
        if (e.disabled || !e.checkVisibility()) continue;
        const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
        least = Math.min(least, (a + 0.05) / (b + 0.05));
    }
    return least;
}"""


def test_phone(browser: Browser, made: Path) -> None:
    """On a phone nothing is wider than the screen but what scrolls by itself."""
    shown = Shown(browser, made, viewport={"width": 375, "height": 812})
    assert shown.page.evaluate("document.documentElement.scrollWidth") == 375
    wide = shown.page.evaluate(
        """[...document.querySelectorAll("p, li, dd, caption span, .flame svg, input, button")]
            .filter((e) => e.checkVisibility() && !e.closest(".table tbody, thead, nav")
                && e.getBoundingClientRect().right > 376).map((e) => e.textContent)"""
    )
    assert wide == []
    shown.close()


def test_nothing_else_can_run_or_be_loaded(browser: Browser, made: Path) -> None:
    """What gets into the page in spite of all is neither run nor fetched."""
    shown = Shown(browser, made)
    blocked = shown.page.evaluate(
        """async () => {
            const seen = [];
            addEventListener("securitypolicyviolation", (e) => seen.push(e.effectiveDirective));
            const script = document.createElement("script");
            let trusted = false;
            try { script.text = "window.ran = 1"; trusted = true; } catch { seen.push("text"); }
            const text = document.createTextNode("window.ran = 1");
            script.append(text);
            document.body.append(script);
            document.body.append(Object.assign(new Image(), { src: "http://127.0.0.1:9/x.png" }));
            const style = document.createElement("style");
            style.append("body { background: url(http://127.0.0.1:9/y.png) }");
            document.body.append(style);
            await fetch("http://127.0.0.1:9/z").catch(() => 0);
            await new Promise((done) => setTimeout(done, 50));
            return [seen, trusted, window.ran];
        }"""
    )
    seen, trusted, ran = blocked
    assert {"text", "img-src", "style-src-elem", "connect-src"} <= set(seen)
    assert not trusted and ran is None
    assert shown.refused == ["csp"] * (len(shown.fetched) - 1)
    shown.context.close()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Pages of captures in which all texts are hostile: a folder's names, and queries of 1 MB."""
    folder = tmp_path_factory.mktemp("hostile")
    capture = folder / f"{MARKUP.replace('/', '')}\u202e"
    shutil.copytree(MIXED, capture)
    lines = (capture / "backends.tsv").read_text().splitlines()
    who = f"'{HOSTILE}".replace(" ", "").replace("\x1b", "")
    rows = [
        re.sub(r"postgres: main: \S+ \S+ \[", f"postgres: main: {who} {who} [", line)
        for line in lines[1:]
    ]
    rows = [f"{row}\t{HOSTILE}{'x' * (1 << 20)}" for row in rows]
    (capture / "backends.tsv").write_text("\n".join([f"{lines[0]}\tapplication", *rows, ""]))
    with (capture / "manifest").open("a") as manifest:
        manifest.write(f"command\t{HOSTILE}\nhost\t{HOSTILE}\n{HOSTILE}\t{HOSTILE}\n")
    names = folder / "names.html"
    assert main(["report", str(capture), "--html", str(names)]) == 0

    analysis, sets, account = report_of(open_capture(SAMPLE, Naming()))
    assert account is not None
    queries = account.joined.queries
    long = f"SELECT {HOSTILE}" + "x\u202e" * (1 << 19)
    table = [
        *queries.table[:2],
        *(Query(f"{long}{i}", i) if i < 5 else one for i, one in enumerate(queries.table[2:], 2)),
    ]
    joined = replace(account.joined, queries=replace(queries, table=table))
    texts = folder / "queries.html"
    texts.write_bytes(page(analysis, sets, replace(account, joined=joined)))
    return [names, texts]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("script", [True, False])
def test_hostile_texts(browser: Browser, hostile: list[Path], number: int, script: bool) -> None:
    """Names and queries of any characters and length are text, cut where long, and no more."""
    file = hostile[number]
    assert file.stat().st_size < 3_000_000
    shown = Shown(browser, file, java_script_enabled=script)
    assert shown.page.locator("img, iframe, object, embed, link, base").count() == 0
    assert shown.page.locator("script").count() == 2
    content = file.read_text()
    assert content.isprintable() or set(content) - set(filter(str.isprintable, content)) == {"\n"}
    assert "onerror=alert(2)>" not in content
    body = shown.page.locator("body").inner_text()
    assert re.search(r"<img ?src=x ?onerror=alert\([2?]\)>", body)
    assert r"\x1b[31m\u202e\u2066\u200b\ufeff" in body
    more = shown.page.locator("details", has_text=f"the first {TEXT_MAX:,} of 1,0").first
    assert not more.locator("p").is_visible()
    more.locator("summary").click()
    assert len(more.locator("p").inner_text()) >= TEXT_MAX
    assert "long texts are cut" in shown.page.locator("#caveats").inner_text()
    shown.close()


@pytest.mark.parametrize(
    ("capture", "named", "absent"),
    [
        (MIXED, [], {"sets", "audit"}),
        (ROOT / "tests/data/usdt.data", ["--pg-version", "15.18"], {"sets", "audit"}),
    ],
)
def test_what_was_not_recorded(
    browser: Browser,
    page_of: Callable[..., Path],
    capture: Path,
    named: list[str],
    absent: set[str],
) -> None:
    """Parts of which a capture holds nothing are absent, or say so in a sentence."""
    shown = Shown(browser, page_of(capture, *named))
    ids = shown.page.evaluate("[...document.querySelectorAll('section')].map((s) => s.id)")
    assert not absent & set(ids)
    assert ids[0] == "caveats" and ids[-1] == "capture"
    for section in shown.page.locator("section").all():
        assert len(section.inner_text().splitlines()) > 1
    assert "--with offcpu" in shown.page.locator("#accounting").inner_text()
    assert "oncpu and offcpu" in shown.page.locator("#flame").inner_text()
    links = shown.page.locator("nav a").evaluate_all("all => all.map((a) => a.hash.slice(1))")
    assert links == ids
    shown.close()


def test_print(browser: Browser, made: Path, tmp_path: Path) -> None:
    """On paper flame graphs are whole, also while one is zoomed on the screen."""
    shown = Shown(browser, made)
    graph = flame(shown.page)
    graph.locator("rect").last.click()
    zoomed = graph.locator("rect").count()
    shown.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert graph.locator("rect").count() > zoomed
    assert graph.locator("svg").get_attribute("viewBox").startswith("0 0 1000 ")
    shown.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert graph.locator("rect").count() == zoomed
    assert shown.page.pdf().startswith(b"%PDF-")
    shown.close()


def test_options(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """--html goes with no option that chooses a part; what was there stays when it fails."""
    file = tmp_path / "page.html"
    file.write_text("old")
    for option in (["--json"], ["--histogram"], ["--audit"], ["--by", "user"]):
        assert main(["report", str(MIXED), "--html", str(file), *option]) == 2
        assert "--html" in capfd.readouterr().err
    assert main(["report", str(tmp_path), "--html", str(file)]) == 1
    assert main(["report", str(MIXED), "--html", str(tmp_path / "none/page.html")]) == 1
    assert "cannot be written" in capfd.readouterr().err
    assert file.read_text() == "old"
    assert [*tmp_path.iterdir()] == [file]


def test_visible() -> None:
    """What is printed stays; all else is written out, so that no character acts or hides."""
    assert visible("naïve שלום 🐘 <b>") == "naïve שלום 🐘 <b>"
    assert visible("a\0\x1b\x7f\x85\u2028\u202e\ud800\U000e0001") == (
        "a\\x00\\x1b\\x7f\\x85\\u2028\\u202e\\ud800\\U000e0001"
    )


def test_great_flame_graphs() -> None:
    """Frames stand before those on them, sums are right, and only the greatest are kept."""
    names, depths, values = _tree("a;b 1\na b;c 5\na;b;c 2\na 7\n")
    assert [*zip(names, depths.tolist(), values.tolist(), strict=True)] == [
        ("a", 0, 10), ("b", 1, 3), ("c", 2, 2), ("a b", 0, 5), ("c", 1, 5),
    ]  # fmt: skip
    generator = np.random.default_rng(5)
    stacks = "".join(
        f"{';'.join(f'f{n}' for n in generator.integers(0, 9, 8))} {generator.integers(1, 99)}\n"
        for _ in range(5000)
    )
    graphs = Graphs()
    assert "are not drawn" in "".join(graphs.add("wall", stacks, {}, False))
    assert NODES_MAX * 4 < len(graphs.data()) < 250_000
