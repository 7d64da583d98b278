// The live page of a fleet: asks for fleet.json again and again, and draws what it says. Names are only ever set as text.
"use strict";
(() => {
const $ = s => document.querySelector(s), root = document.documentElement;
const SVG = "http://www.w3.org/2000/svg", KEPT = 600;
const period = Number(document.body.dataset.period) * 1000, hot = Number(document.body.dataset.hot);
const history = [];  // [time in s, watts by rack]
let newest = null;

const make = (tag, cls, text) => {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text;
  return e;
};
const known = v => v !== null && v !== undefined;
const watts = w => !known(w) ? "–" : w >= 1e6 ? (w / 1e6).toPrecision(3) + " MW" : w >= 1e3 ? (w / 1e3).toPrecision(3) + " kW" : Math.round(w) + " W";
const celsius = c => known(c) ? Math.round(c) + " °C" : "–";
const factor = c => known(c) ? c.toFixed(2) : "–";
const time = s => s < 120 ? Math.round(s) + " s" : s < 7200 ? Math.round(s / 60) + " min" : (s / 3600).toFixed(1) + " h";
const clock = s => new Date(s * 1000).toLocaleTimeString();
// Blue is cool and red is hot; the number stands beside it, so that nobody has to see colours.
const shade = c => {
  if (!known(c)) return "var(--idle)";
  const t = Math.max(0, Math.min(1, (c - 30) / Math.max(hot - 30, 1)));
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  return `hsl(${Math.round(212 + 148 * t)} 62% ${isDark ? 33 : 42}%)`;  // through purple: white text reads on all of it
};

const tile = (value, label, kind) => {
  const t = make("div", kind ? "tile " + kind : "tile");
  t.append(make("b", "", value), make("span", "", label));
  return t;
};

function tiles(f) {
  const hottest = Math.max(...f.nodes.map(n => known(n.temperature_c) ? n.temperature_c : -Infinity));
  const trips = f.racks.reduce((sum, r) => sum + r.near_trips, 0);
  const all = [
    tile(watts(f.power_w), "power now"),
    tile(isFinite(hottest) ? celsius(hottest) : "–", "hottest device", hottest > hot ? "bad" : ""),
    tile(String(trips), "over-currents and near trips", trips ? "bad" : ""),
    tile(`${f.answering_nodes} of ${f.asked_nodes}`, "nodes answer", f.answering_nodes < f.asked_nodes ? "warned" : ""),
  ];
  if (f.known_nodes !== f.answering_nodes || f.asked_nodes !== f.nodes.length) {
    all.push(tile(`${f.known_nodes} of ${f.nodes.length}`, "nodes of known power", f.known_nodes < f.nodes.length ? "warned" : ""));
  }
  if (f.unmeasured_w > 0) all.splice(1, 0, tile(watts(f.unmeasured_w), "of it not measured", "warned"));
  const above = f.nodes.filter(n => n.over_lease_w > 0).length;
  if (above) all.push(tile(String(above), "nodes above their lease", "bad"));
  if (f.budget) {
    all.splice(1, 0, tile(`${watts(f.budget.exposure_w)} of ${watts(f.budget.limit_w)}`, "leased by the governor"));
    if (f.budget.throttled_w > 0) all.push(tile(watts(f.budget.throttled_w), "taken back: the meter is high", "warned"));
  }
  $("#tiles").replaceChildren(...all);
}

function racks(f) {
  const cards = f.racks.map(r => {
    const card = make("section", "rack"), head = make("h3", "", r.name || "no rack");
    const full = known(r.power_w) && r.limit_w ? r.power_w / r.limit_w : null;
    head.append(make("small", full > 0.8 ? "bad" : "", watts(r.power_w) + (full === null ? "" : `, ${Math.round(full * 100)}% of ${watts(r.limit_w)}`)));
    card.append(head);
    if (full !== null) {
      const bar = make("div", "load"), fill = make("i", full > 0.8 ? "bad" : "");
      fill.style.width = Math.min(full, 1) * 100 + "%";
      bar.append(fill);
      card.append(bar);
    }
    const cells = make("div", "cells");
    f.nodes.filter(n => n.rack === r.name).forEach(n => {
      const lost = n.problem && !known(n.power_w), cell = make("div", lost ? "cell lost" : "cell");
      cell.style.background = lost ? "" : shade(n.temperature_c);
      const about = n.basis === "measured" || n.basis === "governor" ? "" : "≈ ";  // modelled, or of the file
      cell.append(make("b", "", n.name), make("span", "", lost ? "unknown" : `${celsius(n.temperature_c)} · ${about}${watts(n.power_w)}`));
      if (n.over_lease_w > 0) cell.append(make("span", "over", "above its lease"));
      cell.title = [...n.notes, ...n.jobs].join(", ") || "no throttling";
      cells.append(cell);
    });
    card.append(cells);
    return card;
  });
  $("#racks").replaceChildren(...cards);
}

function rows(id, list, fill) {
  $(id).replaceChildren(...list.map(item => {
    const row = make("tr");
    fill(item).forEach(([text, cls]) => row.append(make("td", cls || "", text)));
    return row;
  }));
}

function tables(f) {
  const first = [...f.nodes].sort((a, b) => !a.problem - !b.problem || !a.over_lease_w - !b.over_lease_w || (b.temperature_c ?? -1) - (a.temperature_c ?? -1));
  rows("#nodes tbody", first.slice(0, 200), n => [
    [n.name], [n.rack], [watts(n.power_w), "n"], [watts(n.cap_w), "n"], [watts(n.leased_w), "n"],
    [celsius(n.temperature_c), n.temperature_c > hot ? "n bad" : "n"], [factor(n.crest_factor), "n"],
    [String(n.near_trips), n.near_trips ? "n bad" : "n"], [n.notes.join(", ") || "–", n.over_lease_w > 0 ? "bad" : n.problem ? "warned" : ""],
  ]);
  $("#leases").hidden = !f.jobs.length;
  rows("#jobs tbody", f.jobs.slice(0, 100), j => [
    [j.job], [j.state, j.state === "shed" ? "bad" : ""], [watts(j.granted_w), "n"], [watts(j.asked_w), "n"], [time(j.ends_in_s), "n"], [j.reason || "–"],
  ]);
  $("#noevents").hidden = f.events.length > 0;
  rows("#events tbody", f.events.slice(0, 50), e => [[clock(e.epoch_s)], [e.node], [e.kind.replaceAll("_", " "), "bad"], [String(e.count), "n"]]);
}

function chart() {
  const svg = $("#chart"), w = svg.clientWidth || 800, h = 190, left = 62, bottom = 20;
  svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
  const names = [...new Set(history.flatMap(([, by]) => Object.keys(by)))];
  const top = Math.max(1, ...history.flatMap(([, by]) => Object.values(by).filter(known))) * 1.08;
  const t0 = history[0][0], t1 = Math.max(history.at(-1)[0], t0 + 10);
  const x = t => left + (t - t0) / (t1 - t0) * (w - left - 8), y = v => h - bottom - v / top * (h - bottom - 8);
  const put = (tag, attributes, text) => {
    const e = document.createElementNS(SVG, tag);
    Object.entries(attributes).forEach(([k, v]) => e.setAttribute(k, v));
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const parts = [];
  [0, 0.5, 1].forEach(s => {
    const v = top * s / 1.08;
    parts.push(put("line", { x1: left, x2: w - 8, y1: y(v), y2: y(v), class: "grid" }));
    parts.push(put("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, watts(v)));
  });
  parts.push(put("text", { x: left, y: h - 4 }, clock(t0)), put("text", { x: w - 8, y: h - 4, "text-anchor": "end" }, clock(t1)));
  names.forEach((name, i) => {
    let path = "", pen = "M";
    history.forEach(([t, by]) => {
      if (!known(by[name])) { pen = "M"; return; }
      path += `${pen}${x(t).toFixed(1)} ${y(by[name]).toFixed(1)}`;
      pen = "L";
    });
    parts.push(put("path", { d: path || "M0 0", style: `stroke:var(--c${i % 8})` }));
  });
  svg.replaceChildren(...parts);
  $("#legend").replaceChildren(...names.slice(0, 24).map((name, i) => {
    const item = make("li"), mark = make("i", "k" + i % 8);
    item.append(mark, name || "no rack");
    return item;
  }));
}

function draw(f) {
  newest = f;
  tiles(f);
  racks(f);
  tables(f);
  const last = history.at(-1);
  if (!last || f.epoch_s > last[0]) history.push([f.epoch_s, Object.fromEntries(f.racks.map(r => [r.name, r.power_w]))]);
  if (history.length > KEPT) history.shift();
  chart();
  const said = [...f.problems];
  if (f.budget && f.budget.emergency) said.unshift("Emergency: " + f.budget.emergency_text);
  $("#problems").replaceChildren(...said.map(text => make("p", "warn", text)));
  $("#when").textContent = "as of " + clock(f.epoch_s);
}

async function update() {
  try {
    const answer = await fetch("fleet.json", { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error("status " + answer.status);
    draw(await answer.json());
    $("#lost").hidden = true;
  } catch (error) {
    $("#lost").hidden = false;
    $("#lost").textContent = "No answer from tessera fleet serve: what is shown may be old (" + error.message + ").";
  }
  setTimeout(update, period);
}

$("#theme").addEventListener("click", () => {
  const now = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  if (newest) draw(newest);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => newest && draw(newest));
addEventListener("resize", () => history.length && chart());

async function begin() {
  try {
    const answer = await fetch("history.json", { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (answer.ok) history.push(...await answer.json());
  } catch { /* the plot then begins now; update says that nobody answers */ }
  update();
}
begin();
})();
