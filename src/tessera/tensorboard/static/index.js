// TensorBoard loads this into the plugin's frame. Names come from programs: they are only set as text.
const make = (tag, more = {}, ...children) => {
  const { dataset, ...rest } = more, element = Object.assign(document.createElement(tag), rest);
  Object.assign(element.dataset, dataset);
  element.append(...children.filter(c => c !== null));
  return element;
};
const at = name => new URL(name, import.meta.url);
const fetched = async address => {
  const reply = await fetch(address);
  if (!reply.ok) throw new Error(`TensorBoard answered ${reply.status}`);
  return reply.json();
};
const COMPARED = 4, MOST = 12, EVERY_MS = 15000;

// TensorBoard shows its theme only as a class of the surrounding page, which is of the same origin.
const isDark = () => {
  try { return parent.document.body.classList.contains("dark-mode"); } catch { return matchMedia("(prefers-color-scheme: dark)").matches; }
};

const state = { runs: [], lookedIn: [], run: null, view: "report", chosen: null };
let frame = null;

const paint = () => {
  const theme = isDark() ? "dark" : "light";
  document.documentElement.dataset.theme = theme;
  const inner = frame && frame.contentDocument && frame.contentDocument.documentElement;
  if (inner && inner.dataset.theme !== theme) {
    inner.dataset.theme = theme;
    frame.contentWindow.dispatchEvent(new Event("tessera-theme"));
  }
};

const empty = () => make("main", {}, make("div", {},
  make("h1", { textContent: "No Tessera runs yet" }),
  make("p", { textContent: `Searched for .tessera files in ${state.lookedIn.join(", ") || "no local directory"} and below.` }),
  make("p", { textContent: "Record one in a training script:" }),
  make("pre", { textContent: `from tessera import profile\n\nwith profile.session(tensorboard_dir="${state.lookedIn[0] || "runs"}"):\n    train()` }),
  make("p", { textContent: "or without changing the script:" }),
  make("pre", { textContent: `tessera run train.py          # writes runs/train.tessera\ntensorboard --logdir runs` }),
  make("p", { className: "dim", textContent: "Cloud log directories (gs://, s3://) are not supported. This page refreshes by itself." })));

const report = () => {
  const version = state.runs.find(r => r.run === state.run)?.version || "";
  const address = at("page");
  address.searchParams.set("run", state.run);
  address.searchParams.set("version", version);
  frame = make("iframe", { src: address.href, title: `Energy of ${state.run}` });
  frame.addEventListener("load", paint);
  return frame;
};

const COLOUR = n => n < 0 ? "var(--idle)" : `var(--c${n})`;
const table = found => {
  const head = make("tr", {}, make("th", { textContent: "" }), ...found.runs.map((r, i) => make("th", { scope: "col" }, r.run,
    make("span", { textContent: [r.name, r.device, r.basis === "measured" ? "" : r.basis.toUpperCase()].filter(Boolean).join(" · ") }),
    make("span", { textContent: i ? "" : "reference" }))));
  const rows = found.rows.map(row => make("tr", {}, make("th", { scope: "row", textContent: row.title }), ...row.cells.map(cell => {
    if (!cell) return make("td", { textContent: "-" });
    const change = cell.change ? make("small", { className: cell.same || cell.better === null ? "" : cell.better ? "better" : "worse",
      textContent: cell.same ? `${cell.change}, within the intervals` : cell.change }) : null;
    return make("td", {}, cell.text, change);
  })));
  const bars = make("tr", {}, make("th", { scope: "row", textContent: "where" }), ...found.runs.map(r => {
    const said = r.parts.map(([name, share]) => `${name} ${(100 * share).toFixed(0)}%`).join(", ");
    const bar = make("div", { className: "bar", title: said });
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", said);
    r.parts.forEach(([, share, colour]) => {
      const piece = make("i");
      piece.style.width = `${100 * share}%`;
      piece.style.background = COLOUR(colour);
      bar.append(piece);
    });
    return make("td", {}, r.parts.length ? bar : "-");
  }));
  const parts = new Map(found.runs.flatMap(r => r.parts.map(([name, , colour]) => [name, colour])));
  const legend = make("ul", { className: "legend" }, ...[...parts].map(([name, colour]) => {
    const swatch = make("i");
    swatch.style.background = COLOUR(colour);
    return make("li", {}, swatch, name);
  }));
  return make("div", {}, make("div", { className: "scroll" }, make("table", { id: "totals" }, make("caption", { hidden: true,
    textContent: "Totals of the chosen runs" }), make("thead", {}, head), make("tbody", {}, ...rows, bars))), legend,
  make("p", { className: "dim", textContent: "± is the half-width of a 90% interval; a change within the intervals is not significant." }),
  ...found.notes.map(note => make("p", { className: "dim", textContent: `${note}.` })),
  ...found.failed.map(f => make("p", { className: "warn", textContent: `${f.run}: ${f.error}` })));
};

const compare = () => {
  if (!state.chosen) state.chosen = state.runs.slice(0, COMPARED).map(r => r.run).reverse();
  const out = make("div", { id: "compared" });
  const load = async () => {
    if (!state.chosen.length) { out.replaceChildren(make("p", { textContent: "Choose runs above." })); return; }
    out.replaceChildren(make("p", { className: "dim", textContent: "Reading the runs ..." }));
    const address = at("compare"), asked = state.chosen.join("\n");
    state.chosen.forEach(run => address.searchParams.append("run", run));
    try {
      const found = await fetched(address);
      if (asked === state.chosen.join("\n")) out.replaceChildren(table(found));
    } catch (error) { out.replaceChildren(make("p", { className: "warn", textContent: String(error.message) })); }
  };
  const boxes = state.runs.map(r => {
    const box = make("input", { type: "checkbox", checked: state.chosen.includes(r.run) });
    box.addEventListener("change", () => {
      state.chosen = box.checked ? [...state.chosen, r.run].slice(-MOST) : state.chosen.filter(name => name !== r.run);
      load();
    });
    return make("label", {}, box, r.run, make("span", { className: "dim", textContent: r.modified }));
  });
  load();
  return make("main", {}, make("div", {}, make("h1", { textContent: "Totals side by side" }),
    make("fieldset", {}, make("legend", { textContent: "runs; the others are compared with the first one chosen" }), ...boxes), out));
};

const show = () => {
  frame = null;
  const views = { report: "Report", compare: "Compare" };
  const choose = make("select", { id: "run" }, ...state.runs.map(r => make("option", { value: r.run, textContent: r.run, selected: r.run === state.run })));
  choose.addEventListener("change", () => { state.run = choose.value; state.view = "report"; show(); });
  const buttons = Object.entries(views).map(([name, text]) => {
    const button = make("button", { type: "button", id: `view-${name}`, textContent: text });
    button.setAttribute("aria-pressed", state.view === name);
    button.addEventListener("click", () => { state.view = name; show(); });
    return button;
  });
  const count = `${state.runs.length} run${state.runs.length === 1 ? "" : "s"}`;
  const bar = make("nav", { ariaLabel: "Runs" }, make("label", {}, "Run", choose), ...buttons, make("span", { className: "dim", textContent: count }));
  document.body.replaceChildren(...state.runs.length ? [bar, state.view === "report" ? report() : compare()] : [empty()]);
  paint();
};

const refresh = async () => {
  let found;
  try { found = await fetched(at("runs")); } catch { return; }  // TensorBoard was stopped: what is shown stays
  const known = state.runs.map(r => r.run).join("\n"), now = found.runs.map(r => r.run).join("\n");
  state.runs = found.runs;
  state.lookedIn = found.looked_in;
  if (!state.runs.some(r => r.run === state.run)) state.run = state.runs.length ? state.runs[0].run : null;
  if (known !== now || !document.body.querySelector("nav, main")) show();
};

export const render = async () => {
  document.documentElement.lang = "en";
  document.title = "Tessera";
  document.head.append(make("link", { rel: "stylesheet", href: at("index.css").href }));
  await refresh();
  setInterval(refresh, EVERY_MS);
  try { new MutationObserver(paint).observe(parent.document.body, { attributes: true, attributeFilter: ["class"] }); } catch { /* another origin */ }
};
