// Everything here draws or sorts what Python computed. Names come from programs: they are only ever set as text.
// The files of this folder are joined into one script (see run_html.py), in which these names are shared.
performance.mark("tessera-script");
const $ = (s, at = document) => at.querySelector(s), $$ = (s, at = document) => [...at.querySelectorAll(s)];
const root = document.documentElement, tip = $("#tip");

const data = JSON.parse($("#data").textContent);
const drawn = [];  // what draws itself anew when the colours change
const redraw = () => drawn.forEach(draw => draw());
// After the browser has shown the text: nobody waits for a plot to read the answer. A hidden tab never shows any.
const later = start => {
  let begun = false;
  const once = () => { if (!begun) { begun = true; start(); } };
  try { new PerformanceObserver(once).observe({ type: "paint", buffered: true }); } catch { /* the timer will do */ }
  setTimeout(once, 400);
  addEventListener("beforeprint", once);
};
const css = name => getComputedStyle(root).getPropertyValue("--" + name).trim();

// -- theme ------------------------------------------------------------------------------------------------------
const dark = matchMedia("(prefers-color-scheme: dark)");
$("#theme").addEventListener("click", () => {
  const now = root.dataset.theme || (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  redraw();
});
dark.addEventListener("change", redraw);
addEventListener("tessera-theme", redraw);  // TensorBoard's theme was switched around us
// Paper is white, whatever the screen is.
let shown = null;
addEventListener("beforeprint", () => { shown = root.dataset.theme || ""; root.dataset.theme = "light"; redraw(); });
addEventListener("afterprint", () => { if (shown) root.dataset.theme = shown; else delete root.dataset.theme; redraw(); });

// -- tables -----------------------------------------------------------------------------------------------------
$$("table.sort").forEach(table => $$("th button", table).forEach(button => button.addEventListener("click", () => {
  const th = button.parentElement, i = th.cellIndex, body = table.tBodies[0];
  const numeric = th.classList.contains("n");
  const up = th.getAttribute("aria-sort") === (numeric ? "descending" : "ascending") ? numeric : !numeric;
  $$("th", table).forEach(other => other.removeAttribute("aria-sort"));
  th.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => numeric ? Number(row.cells[i].dataset.v ?? -Infinity) : row.cells[i].textContent;
  const sign = up ? 1 : -1;
  [...body.rows].map(row => [key(row), row])
    .sort(([a], [b]) => sign * (numeric ? a - b : a.localeCompare(b))).forEach(([, row]) => body.appendChild(row));
})));
const unfold = panel => {
  $$(".fold", panel).forEach(table => table.classList.remove("fold"));
  $$(".unfold", panel).forEach(button => button.remove());
};
$$(".unfold").forEach(button => button.addEventListener("click", () => unfold(button.parentElement)));
$$("input[type=search]").forEach(input => input.addEventListener("input", () => {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  unfold(input.closest("[role=tabpanel]"));
  const rows = [...$("table", input.closest("[role=tabpanel]")).tBodies[0].rows];
  rows.forEach(row => {
    const text = (row.cells[0].title + " " + row.cells[0].textContent).toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
    shown += !row.hidden;
  });
  input.nextElementSibling.textContent = words.length ? `${shown} of ${rows.length}` : "";
}));
const tabs = $$("[role=tab]");
const choose = tab => {
  tabs.forEach(t => {
    const on = t === tab;
    t.setAttribute("aria-selected", on);
    t.tabIndex = on ? 0 : -1;
    document.getElementById(t.getAttribute("aria-controls")).hidden = !on;
  });
};
tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", e => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (!step) return;
    const next = tabs[(i + step + tabs.length) % tabs.length];
    choose(next);
    next.focus();
  });
});

// -- icicle -----------------------------------------------------------------------------------------------------
const cells = $$(".icicle button").map(b => ({ b, l: +b.dataset.l, w: +b.dataset.w, d: +b.dataset.d }));
const zoomTo = to => cells.forEach(c => {
  const left = (c.l - to.l) / to.w * 100, wide = c.w / to.w * 100;
  const above = c.d <= to.d && c.l <= to.l + 1e-9 && c.l + c.w >= to.l + to.w - 1e-9;
  c.b.hidden = !above && (c.d <= to.d || left >= 100 - 1e-6 || left + wide <= 1e-6);
  c.b.style.left = (above ? 0 : left) + "%";
  c.b.style.width = (above ? 100 : wide) + "%";
  c.b.classList.toggle("thin", !above && wide < 2.2);
});
cells.forEach(c => c.b.addEventListener("click", () => zoomTo(c)));

// -- tooltip ----------------------------------------------------------------------------------------------------
const say = (x, y, head, lines) => {
  tip.replaceChildren();
  const b = document.createElement("b");
  b.textContent = head;
  tip.append(b, ...lines.filter(Boolean).map(line => {
    const div = document.createElement("div");
    div.textContent = line;
    return div;
  }));
  tip.hidden = false;
  const w = tip.offsetWidth, h = tip.offsetHeight;
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - w - 8)) + "px";
  tip.style.top = Math.max(4, y + 18 + h > innerHeight ? y - h - 10 : y + 18) + "px";
};
$$(".icicle button").forEach(b => {
  const show = (x, y) => say(x, y, b.dataset.n, b.dataset.t.split("\n"));
  b.addEventListener("mousemove", e => show(e.clientX, e.clientY));
  b.addEventListener("mouseleave", () => { tip.hidden = true; });
  b.addEventListener("focus", () => { const r = b.getBoundingClientRect(); show(r.left, r.bottom - 14); });
  b.addEventListener("blur", () => { tip.hidden = true; });
});

// -- plots that are drawn already: what is under the pointer, or chosen with the arrow keys ---------------------
const reveal = id => {
  const row = id && document.getElementById(id);
  if (!row) return;
  row.closest("details").open = true;
  $$("tr.hit").forEach(r => r.classList.remove("hit"));
  row.classList.add("hit");
  row.tabIndex = -1;
  row.focus({ preventScroll: true });
  row.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
};
$$(".roof, .heat").forEach(plot => {
  const items = $$("[data-n]", plot);
  let at = -1;
  const choose = (item, x, y) => {
    items.forEach(i => i.classList.toggle("on", i === item));
    if (item) say(x, y, item.dataset.n, item.dataset.t.split("\n")); else tip.hidden = true;
  };
  plot.addEventListener("pointermove", e => choose(e.target.closest("[data-n]"), e.clientX, e.clientY));
  plot.addEventListener("pointerleave", () => choose(null));
  plot.addEventListener("blur", () => choose(null));
  plot.addEventListener("click", e => { const item = e.target.closest("[data-to]"); if (item) reveal(item.dataset.to); });
  plot.addEventListener("keydown", e => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
    if (step && items.length) {
      e.preventDefault();
      at = (at + step + items.length) % items.length;
      const box = items[at].getBoundingClientRect();
      choose(items[at], box.right, box.bottom);
    } else if (e.key === "Enter" && at >= 0) reveal(items[at].dataset.to);
    else if (e.key === "Escape") choose(null);
  });
});
