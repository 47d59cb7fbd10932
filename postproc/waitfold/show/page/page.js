// What the page of `waitfold report --html` does beyond showing what is in it: tables sort and
// filter, flame graphs are drawn, zoom and are searched, and the theme can be chosen. All text
// goes into the page as text; nothing is ever parsed as HTML.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const FRAME = 17; // height of a frame in pixels
const LETTER = 6.65; // width of a letter of 11 px in monospace
const PRINTED = 1000; // width of a graph on paper

const make = (tag, attributes = {}, text = "") => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
};

const makeSvg = (tag, attributes) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

// As text.human() has it: three digits and a unit.
const human = (ns) => {
  for (const [size, unit] of [[3600e9, "h"], [1e9, "s"], [1e6, "ms"], [1e3, "us"]]) {
    if (ns >= (unit === "h" ? 10000e9 : size * 0.9995)) {
      const x = ns / size;
      return x.toFixed(x < 9.995 ? 2 : x < 99.95 ? 1 : 0) + unit;
    }
  }
  return `${Math.round(ns)}ns`;
};

const percent = (part, whole) => (whole ? ((100 * part) / whole).toPrecision(3) : "0") + " %";

// Theme -----------------------------------------------------------------------------------------

const theme = () => {
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const tell = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `${button.textContent} theme`);
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    tell();
  });
  system.addEventListener("change", tell);
  tell();
  button.hidden = false;
};

// Tables ----------------------------------------------------------------------------------------

const valueOf = (row, column) => {
  const cell = row.cells[column];
  return cell.dataset.v === undefined ? cell.textContent.toLowerCase() : Number(cell.dataset.v);
};

const sortable = (table) => {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const sort = (head) => {
    const column = head.cellIndex;
    const before = head.getAttribute("aria-sort");
    const isNumber = head.classList.contains("n");
    // The greatest first, names from A on; a second time the other way round.
    const descending = before ? before === "ascending" : isNumber;
    const keyed = [...body.rows].map((row) => [valueOf(row, column), row]);
    keyed.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (descending ? -1 : 1));
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    body.append(...keyed.map(([, row]) => row));
  };
  for (const head of heads) {
    if (head.tagName !== "TH") continue;
    head.dataset.title = head.textContent; // printed, as a repeated head is without its buttons
    const button = make("button", { type: "button" }, head.textContent);
    button.addEventListener("click", () => sort(head));
    head.replaceChildren(button);
  }
};

const filterable = (table) => {
  const rows = [...table.tBodies[0].rows];
  const input = make("input", {
    type: "search",
    placeholder: "Filter rows",
    "aria-label": `Filter rows of: ${table.caption.textContent}`,
  });
  const output = make("output");
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    let shown = 0;
    for (const row of rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
      shown += !row.hidden;
    }
    output.textContent = wanted ? `${shown} of ${rows.length} rows` : "";
  });
  const tools = make("div", { class: "tools" });
  tools.append(input, output);
  table.parentElement.before(tools);
};

const tables = () => {
  for (const table of document.querySelectorAll(".table > table")) {
    sortable(table);
    if (table.tBodies[0].rows.length > 3) filterable(table);
    // What is wider than the screen must be reached by keyboard.
    table.parentElement.tabIndex = 0;
    table.parentElement.setAttribute("role", "region");
    table.parentElement.setAttribute("aria-label", table.caption.textContent);
    for (const cell of table.querySelectorAll("td.t")) {
      if (cell.dataset.v >= 0) cell.title = `${(cell.dataset.v / 1e6).toFixed(6)} ms`;
    }
  }
};

// Flame graphs ----------------------------------------------------------------------------------

// A graph's frames stand each before those that stand on it, so a frame and all above it are a
// range: from it to before `end`.
class Flame {
  constructor(place, graph, names) {
    this.place = place;
    this.names = graph.names.map((name) => names[name]);
    this.colours = graph.names.map((name) => graph.colours[name]);
    this.values = [0, ...graph.values];
    this.depths = [0, ...graph.depths.map((depth) => depth + 1)];
    this.names.unshift("all");
    this.colours.unshift("rgb(232,228,216)");
    this.zoomed = 0;
    this.at = 0;
    this.wanted = "";
    this.layOut();
    this.addTools(place.dataset.title);
    this.draw(this.room());
    this.tell(0);
    new ResizeObserver(() => this.redraw()).observe(place);
  }

  // Where each frame begins, in ns, what it stands on, and where its range ends.
  layOut() {
    const n = this.values.length;
    this.parent = new Int32Array(n).fill(-1);
    this.start = new Float64Array(n);
    this.end = new Int32Array(n).fill(n);
    const filled = new Float64Array(n);
    const open = [0];
    for (let i = 1; i < n; i++) {
      while (open.length > this.depths[i]) this.end[open.pop()] = i;
      const parent = open.at(-1);
      this.parent[i] = parent;
      this.start[i] = this.start[parent] + filled[parent];
      filled[parent] += this.values[i];
      open.push(i);
      if (parent === 0) this.values[0] += this.values[i];
    }
  }

  addTools(title) {
    const tools = make("div", { class: "tools" });
    this.search = make("input", {
      type: "search",
      placeholder: "Search frames",
      "aria-label": `Search frames of: ${title}`,
    });
    this.reset = make("button", { type: "button" }, "Zoom out");
    this.found = make("output");
    tools.append(this.search, this.reset, this.found);
    this.svg = makeSvg("svg", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "flame graph",
      "aria-label": `${title}. Arrow keys move, Enter zooms, Escape zooms out.`,
    });
    this.status = make("p", { class: "status", role: "status" });
    const graph = make("div");
    graph.append(this.svg, this.status);
    this.place.append(tools, graph);
    this.search.addEventListener("input", () => this.find(this.search.value.toLowerCase()));
    this.reset.addEventListener("click", () => this.zoom(0));
    const frameOf = (event) => event.target.dataset?.i;
    this.svg.addEventListener("click", (event) => {
      const i = frameOf(event);
      if (i !== undefined) this.zoom(Number(i));
    });
    this.svg.addEventListener("pointerover", (event) => {
      const i = frameOf(event);
      if (i !== undefined) this.tell(Number(i));
    });
    this.svg.addEventListener("pointerleave", () => this.tell(this.at));
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
  }

  room() {
    return Math.max(this.place.clientWidth, 200);
  }

  redraw() {
    if (this.printed === undefined && this.width !== this.room()) this.draw(this.room());
  }

  draw(width) {
    this.width = width;
    const root = this.zoomed;
    const scale = width / this.values[root];
    const shown = [];
    for (let i = root; i !== -1; i = this.parent[i]) if (i !== root) shown.push(i);
    for (let i = root; i < this.end[root]; ) {
      if (this.values[i] * scale < 0.4) {
        i = this.end[i];
      } else {
        shown.push(i);
        i += 1;
      }
    }
    const top = shown.reduce((most, i) => Math.max(most, this.depths[i]), 0);
    const height = (top + 1) * FRAME;
    const parts = [];
    this.rects = new Map();
    for (const i of shown) {
      const isBelow = i < root;
      const x = isBelow ? 0 : (this.start[i] - this.start[root]) * scale;
      const w = isBelow ? width : this.values[i] * scale;
      const y = height - (this.depths[i] + 1) * FRAME;
      const rect = makeSvg("rect", {
        x: x.toFixed(2), y, width: w.toFixed(2), height: FRAME, fill: this.colours[i], "data-i": i,
      });
      if (isBelow) rect.classList.add("above");
      if (this.isHit(i)) rect.classList.add("hit");
      if (i === this.at && this.moved) rect.classList.add("here");
      this.rects.set(i, rect);
      parts.push(rect);
      const letters = Math.floor((w - 6) / LETTER);
      if (letters > 2) {
        const name = this.names[i];
        const text = makeSvg("text", { x: (x + 3).toFixed(2), y: y + 12.5 });
        text.textContent = name.length > letters ? `${name.slice(0, letters - 1)}…` : name;
        parts.push(text);
      }
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...parts);
    this.reset.disabled = root === 0;
  }

  tell(i) {
    const whole = percent(this.values[i], this.values[0]);
    const part = this.zoomed && i >= this.zoomed ? `, ${percent(this.values[i], this.values[this.zoomed])} of the zoomed` : "";
    this.status.textContent = `${this.names[i]}: ${human(this.values[i])}, ${whole}${part}`;
  }

  zoom(i) {
    this.zoomed = i;
    this.at = i;
    this.draw(this.room());
    this.tell(i);
  }

  isHit(i) {
    return this.wanted !== "" && this.names[i].toLowerCase().includes(this.wanted);
  }

  // Of frames that stand on one another, that which is lowest counts.
  find(wanted) {
    this.wanted = wanted;
    let [time, number] = [0, 0];
    for (let i = 1, inside = 0; i < this.values.length; i++) {
      if (!this.isHit(i)) continue;
      number += 1;
      if (i >= inside) {
        time += this.values[i];
        inside = this.end[i];
      }
    }
    this.found.textContent = wanted
      ? `${number} frames, ${human(time)}, ${percent(time, this.values[0])}`
      : "";
    this.draw(this.room());
  }

  // Move to a frame that is drawn.
  go(i) {
    if (!this.rects.has(i)) return;
    this.rects.get(this.at)?.classList.remove("here");
    this.at = i;
    this.moved = true;
    this.rects.get(i).classList.add("here");
    this.tell(i);
  }

  onKey(event) {
    const at = this.at;
    const on = (i) => [...this.rects.keys()].filter((other) => this.parent[other] === i).sort((a, b) => a - b);
    const beside = on(this.parent[at]);
    const steps = {
      ArrowUp: () => {
        const above = on(at);
        if (above.length) this.go(above.reduce((a, b) => (this.values[b] > this.values[a] ? b : a)));
      },
      ArrowDown: () => this.go(this.parent[at]),
      ArrowLeft: () => this.go(beside[beside.indexOf(at) - 1]),
      ArrowRight: () => this.go(beside[beside.indexOf(at) + 1]),
      Enter: () => this.zoom(at),
      Escape: () => this.zoom(0),
    };
    if (event.ctrlKey || event.altKey || event.metaKey || !(event.key in steps)) return;
    this.moved = true;
    steps[event.key]();
    event.preventDefault();
  }
}

const flames = () => {
  const { names, graphs } = JSON.parse(document.getElementById("data").textContent);
  const all = [...document.querySelectorAll(".flame")].map(
    (place) => new Flame(place, graphs[place.dataset.graph], names),
  );
  // On paper a graph is whole.
  addEventListener("beforeprint", () => {
    for (const flame of all) {
      flame.printed = flame.zoomed;
      flame.zoomed = 0;
      flame.draw(PRINTED);
    }
  });
  addEventListener("afterprint", () => {
    for (const flame of all) {
      flame.zoomed = flame.printed;
      flame.printed = undefined;
      flame.draw(flame.room());
    }
  });
};

theme();
tables();
flames();
