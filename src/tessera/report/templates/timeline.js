// -- timeline ---------------------------------------------------------------------------------------------------
const timeline = canvas => {
const KINDS = { i4: Int32Array, u2: Uint16Array, f4: Float32Array };
const unpack = ([kind, text]) => {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new KINDS[kind](bytes.buffer);
};
const unit = data.unit_ns, span = data.span_ns;
const line = l => ({ ...l, t: unpack(l.t), v: unpack(l.v) });
const power = data.power.map(line), telemetry = data.telemetry.map(line);
const lanes = data.lanes.map(l => ({ ...l, s: unpack(l.s), d: unpack(l.d), n: unpack(l.n), o: unpack(l.o), c: unpack(l.c),
  e: unpack(l.e) }));
const units = [...new Set(telemetry.map(l => l.unit))];
const extent = ls => {
  let low = Infinity, high = -Infinity;
  ls.forEach(l => l.v.forEach(v => { if (v < low) low = v; if (v > high) high = v; }));
  return [low, high];
};
const GAP = 7;
let LEFT = 86;  // room for the labels of tracks; wider where they are long and there is room
const tracks = [];
let y = data.marks.length ? 37 : 26;  // names of marks have a line of their own
const add = (kind, height, more) => { tracks.push({ kind, y, h: height, ...more }); y += height + GAP; };
if (power.length) add("power", 150, { label: "power", lines: power, unit: "W", low: 0, high: extent(power)[1] * (power.length > 1 ? 1.2 : 1.06) || 1 });
if (data.throttle.length) add("throttle", 10, { label: "throttled" });
lanes.forEach(l => {
  add("lane", l.h || (l.kind === "device" ? 24 : 17), { label: l.label, lane: l });
  if (l.h) y -= l.label ? 6 : 3; else if (l.kind !== "device") y -= 4;
});
units.forEach(u => {
  const lines = telemetry.filter(l => l.unit === u), [low, high] = extent(lines), room = (high - low) * .1 || Math.abs(high) * .05 || 1;
  add("line", 46, { label: { MHz: "clocks", "°C": "temperature", "%": "use", GiB: "memory", MiB: "memory", KiB: "memory" }[u] || u, lines, unit: u,
    low: u === "%" || u.endsWith("iB") ? 0 : low - room, high: u === "%" ? 100 : high + room });
});
const height = y + 2;
canvas.style.height = height + "px";
const view = { from: data.shown[0], to: data.shown[1] };
const ctx = canvas.getContext("2d");
let wide = 0, hover = null;
const X = ns => LEFT + (ns - view.from) / (view.to - view.from) * (wide - LEFT - 8);
const T = px => view.from + (px - LEFT) / (wide - LEFT - 8) * (view.to - view.from);
const time = (ns, digits = 4) => {
  const a = Math.abs(ns), [f, u] = a >= 1e9 ? [1e9, "s"] : a >= 1e6 ? [1e6, "ms"] : a >= 1e3 ? [1e3, "µs"] : [1, "ns"];
  return `${+(ns / f).toPrecision(digits)} ${u}`;
};
const joules = j => {
  const a = Math.abs(j), [f, u] = a >= 1e3 ? [1e-3, "kJ"] : a >= 1 ? [1, "J"] : a >= 1e-3 ? [1e3, "mJ"] : [1e6, "µJ"];
  return `${+(j * f).toPrecision(3)} ${u}`;
};
// The first index whose value times the unit is above ns, in a sorted array.
const after = (array, ns) => {
  let low = 0, high = array.length;
  while (low < high) { const mid = (low + high) >> 1; if (array[mid] * unit > ns) high = mid; else low = mid + 1; }
  return low;
};
const steps = range => {
  const rough = range / 8, base = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map(m => m * base).find(s => s >= rough);
};

const draw = () => {
  const ratio = devicePixelRatio || 1;
  wide = canvas.clientWidth;
  if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(height * ratio);
  }
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, wide, height);
  ctx.font = "11px system-ui, sans-serif";
  ctx.textBaseline = "middle";
  const colours = data.categories.map((_, i) => css("c" + i)), ink = css("ink"), dim = css("dim"), rule = css("line");
  const right = wide - 8;
  LEFT = Math.max(86, Math.min(Math.max(0, ...tracks.map(t => width(t.label))) + 18, wide * .3));
  // Time axis.
  const step = steps(view.to - view.from);
  ctx.textAlign = "center";
  for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
    const x = X(t);
    ctx.strokeStyle = rule;
    ctx.beginPath(); ctx.moveTo(x, 20); ctx.lineTo(x, height); ctx.stroke();
    ctx.fillStyle = dim;
    if (x > LEFT + 14 && x < right - 14) ctx.fillText(t ? time(t, 6) : "0", x, 11);
  }
  for (const track of tracks) {
    ctx.fillStyle = dim;
    ctx.textAlign = "right";
    ctx.fillText(cut(track.label, LEFT - 14), LEFT - 10, track.y + track.h / 2);
    ctx.save();
    ctx.beginPath(); ctx.rect(LEFT, 0, right - LEFT, height); ctx.clip();
    if (track.kind === "lane") bars(track, colours, rule, ink);
    else if (track.kind === "throttle") {
      ctx.fillStyle = css("power");
      data.throttle.forEach(([, a, b]) => ctx.fillRect(X(a), track.y, Math.max(1, X(b) - X(a)), track.h));
    } else curves(track, colours, css);
    ctx.restore();
    if (track.lines) {
      scale(track, dim, rule, right, css("card"));
      legend(track, colours, css, right, css("card"));
    }
  }
  marks(css, right);
  if (hover !== null) {
    ctx.strokeStyle = dim;
    ctx.setLineDash([3, 3]);
    ctx.beginPath(); ctx.moveTo(hover, 20); ctx.lineTo(hover, height); ctx.stroke();
    ctx.setLineDash([]);
  }
};

const Y = (track, v) => track.y + track.h - (v - track.low) / (track.high - track.low) * track.h;
const scale = (track, dim, rule, right, card) => {
  ctx.strokeStyle = rule;
  ctx.textAlign = "left";
  const step = steps((track.high - track.low) * (track.kind === "power" ? 2.4 : 4.4));
  for (let v = Math.ceil(track.low / step) * step; v <= track.high; v += step) {
    const at = Y(track, v);
    ctx.beginPath(); ctx.moveTo(LEFT, at); ctx.lineTo(right, at); ctx.stroke();
    const text = `${+v.toPrecision(4)} ${track.unit}`, ty = Math.max(at - 7, track.y + 5);
    ctx.globalAlpha = .78;
    ctx.fillStyle = card;
    ctx.fillRect(LEFT + 2, ty - 6, ctx.measureText(text).width + 4, 12);
    ctx.globalAlpha = 1;
    ctx.fillStyle = dim;
    ctx.fillText(text, LEFT + 4, ty);
  }
};
// Which line is which, where there are several: at the right, in their colours.
const legend = (track, colours, css, right, card) => {
  if (track.lines.length < 2) return;
  const heads = new Set(track.lines.map(l => l.name.split(/[ .]/)[0]));
  let x = right - 6, hidden = 0;
  ctx.textAlign = "right";
  [...track.lines.entries()].reverse().forEach(([i, l]) => {
    const text = heads.size > 1 ? l.name : l.name.slice(l.name.split(/[ .]/)[0].length + 1) || "board";
    const w = ctx.measureText(text).width, at = track.y + 6;
    if (hidden || x - w < LEFT + 110) { hidden++; return; }
    ctx.globalAlpha = .78;
    ctx.fillStyle = card;
    ctx.fillRect(x - w - 3, at - 7, w + 6, 13);
    ctx.globalAlpha = 1;
    ctx.fillStyle = colourOf(track, i, colours, css);
    ctx.fillText(text, x, at);
    x -= w + 14;
  });
  if (hidden) { ctx.fillStyle = css("dim"); ctx.fillText(`${hidden} more`, x, track.y + 6); }
};
const colourOf = (track, i, colours, css) =>
  track.kind === "power" && i === 0 ? css("power") : colours[(i + (track.kind === "power" ? 2 : 3)) % 8];
// Where nobody sampled: hatched, and said where there is room.
const unsampled = (track, from, to, css) => {
  const a = Math.max(X(from), LEFT), b = Math.min(X(to), wide - 8);
  if (b - a < 6) return;
  ctx.save();
  ctx.beginPath(); ctx.rect(a, track.y, b - a, track.h); ctx.clip();
  ctx.strokeStyle = css("line");
  for (let x = a - track.h; x < b; x += 9) {
    ctx.beginPath(); ctx.moveTo(x, track.y + track.h); ctx.lineTo(x + track.h, track.y); ctx.stroke();
  }
  ctx.fillStyle = css("dim");
  ctx.textAlign = "center";
  if (b - a > 80) ctx.fillText("not sampled", (a + b) / 2, track.y + track.h / 2);
  ctx.restore();
};
const curves = (track, colours, css) => {
  if (track.kind === "power") {
    data.spikes.forEach(s => {
      ctx.fillStyle = css("power");
      ctx.globalAlpha = .13;
      ctx.fillRect(X(s.a), track.y, Math.max(2, X(s.b) - X(s.a)), track.h);
      ctx.globalAlpha = 1;
      const x = X(s.p);
      ctx.beginPath(); ctx.moveTo(x - 4, track.y); ctx.lineTo(x + 4, track.y); ctx.lineTo(x, track.y + 7); ctx.fill();
    });
    [[data.idle_w, "idle"], [data.limit_w, "limit"]].forEach(([w, name]) => {
      if (!(w > 0 && w < track.high)) return;
      const at = Y(track, w);
      ctx.strokeStyle = css("dim");
      ctx.setLineDash([5, 4]);
      ctx.beginPath(); ctx.moveTo(LEFT, at); ctx.lineTo(wide, at); ctx.stroke();
      ctx.setLineDash([]);
      ctx.fillStyle = css("dim");
      ctx.textAlign = "right";
      ctx.fillText(`${name} ${Math.round(w)} W`, wide - 12, at - 7);
    });
  }
  track.lines.forEach((l, i) => {
    const colour = colourOf(track, i, colours, css);
    const first = Math.max(0, after(l.t, view.from) - 2), last = Math.min(l.t.length, after(l.t, view.to) + 2);
    const filled = track.kind === "power" && i === 0;
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.lineWidth = 1.5;
    // Each stretch of known samples on its own: where nobody sampled (NaN) there is neither a line nor an area.
    let from = -1;
    const end = k => {
      if (from < 0) return;
      if (filled && k < l.t.length && Number.isNaN(l.v[k])) {
        let next = k;
        while (next < l.t.length && Number.isNaN(l.v[next])) next++;
        unsampled(track, l.t[k - 1] * unit, next < l.t.length ? l.t[next] * unit : span, css);
        ctx.strokeStyle = ctx.fillStyle = colour;
      }
      ctx.beginPath();
      for (let j = from; j < k; j++) ctx.lineTo(X(l.t[j] * unit), Y(track, l.v[j]));
      ctx.stroke();
      if (filled) {
        ctx.lineTo(X(l.t[k - 1] * unit), track.y + track.h);
        ctx.lineTo(X(l.t[from] * unit), track.y + track.h);
        ctx.globalAlpha = .12;
        ctx.fill();
        ctx.globalAlpha = 1;
      }
      from = -1;
    };
    for (let k = first; k < last; k++) if (Number.isNaN(l.v[k])) end(k); else if (from < 0) from = k;
    end(last);
    ctx.lineWidth = 1;
  });
};
const REGION = ["#54708c", "#6b8299", "#476079"];
const bars = (track, colours, rule, ink) => {
  const { s, d, n, c, kind } = track.lane, labels = [];
  const first = Math.max(0, after(s, view.from - track.lane.longest * unit) - 1);
  let lastPixel = -1;
  for (let k = first; k < s.length; k++) {
    const a = s[k] * unit;
    if (a > view.to) break;
    const b = a + d[k] * unit;
    if (b < view.from) continue;
    const x = X(a), w = X(b) - x;
    if (w < .8) { const px = Math.floor(x); if (px === lastPixel) continue; lastPixel = px; }
    const entry = data.names[n[k]];
    ctx.fillStyle = kind === "device" ? colours[entry[2]] : kind === "step" ? rule : REGION[n[k] % REGION.length];
    ctx.fillRect(x, track.y, Math.max(w - (w > 3 ? .5 : 0), .8), track.h);
    const from = Math.max(x, LEFT), room = Math.min(x + w, wide - 8) - from - 8;
    if (kind === "step") {
      if (c[k] === 1) labels.push({ name: entry[0], x, from, room });
    } else if (w > 34 && room > 22 && track.h >= 14) {
      ctx.fillStyle = "#fff";
      ctx.textAlign = "left";
      ctx.fillText(cut(entry[0], room), from + 4, track.y + track.h / 2 + .5);
    }
  }
  if (labels.length) named(labels, track.y + track.h / 2 + .5, ink);
};
// Steps: their names where all of them fit, else their numbers, as many (every 2nd, 5th, 10th ...) as stay apart.
const named = (labels, at, ink) => {
  ctx.fillStyle = ink;
  ctx.textAlign = "left";
  const whole = labels.every(l => width(l.name) <= l.room || l.x < LEFT || l.x + l.room + 8 >= wide - 8);
  const number = l => (l.name.match(/\d+$/) || [null])[0];
  const pitch = labels.length > 1 ? (labels[labels.length - 1].x - labels[0].x) / (labels.length - 1) : Infinity;
  const widest = Math.max(...[labels[0], labels[labels.length - 1]].map(l => width(number(l) || "")));
  let every = 1;
  while (pitch > 0 && every * pitch < widest + 8) every *= String(every)[0] === "2" ? 2.5 : 2;
  let free = LEFT;
  labels.forEach(l => {
    const own = number(l), text = whole || own === null ? cut(l.name, l.room) : own % every ? "" : own;
    const left = l.from + 4, right = left + width(text);
    if (!text || left < free || right > wide - 8 || (l.x < LEFT && width(text) > l.room)) return;
    ctx.fillText(text, left, at);
    free = right + 4;
  });
};
const widths = new Map();
const width = text => {
  let w = widths.get(text);
  if (w === undefined) { w = ctx.measureText(text).width; widths.set(text, w); }
  return w;
};
const cut = (text, room) => {
  const w = width(text);
  if (w <= room) return text;
  const keep = Math.floor(text.length * room / w) - 1;
  return keep > 1 ? text.slice(0, keep) + "…" : "";
};
const marks = (css, right) => {
  ctx.strokeStyle = ctx.fillStyle = css("accent");
  let free = LEFT;
  data.marks.forEach(([name, t]) => {
    const x = X(t);
    if (x < LEFT || x > right) return;
    ctx.setLineDash([2, 3]);
    ctx.beginPath(); ctx.moveTo(x, 20); ctx.lineTo(x, height); ctx.stroke();
    ctx.setLineDash([]);
    const w = ctx.measureText(name).width;
    const beside = x + w + 8 < right ? x + 4 : x - w - 4;  // at the right edge a name stands left of its line
    if (beside > free) { ctx.textAlign = "left"; ctx.fillText(name, beside, 24); free = Math.max(x, beside + w) + 8; }
  });
};

const clamp = () => {
  const length = Math.min(Math.max(view.to - view.from, 200), span * 1.02);
  view.from = Math.max(-span * .01, Math.min(view.from, span * 1.01 - length));
  view.to = view.from + length;
};
let queued = false;
const soon = () => { if (!queued) { queued = true; requestAnimationFrame(() => { queued = false; draw(); }); } };
const zoom = (factor, at = (view.from + view.to) / 2) => {
  view.from = at - (at - view.from) * factor;
  view.to = at + (view.to - at) * factor;
  clamp();
  soon();
};
const pan = share => {
  const by = share * (view.to - view.from);
  view.from += by; view.to += by;
  clamp();
  soon();
};
const show = (from, to) => { view.from = from; view.to = to; clamp(); soon(); };
canvas.addEventListener("wheel", e => {
  if (!(e.ctrlKey || e.metaKey || e.shiftKey)) return;  // a plain wheel scrolls the page
  e.preventDefault();
  zoom(Math.exp((e.deltaY || e.deltaX) * .0025), T(e.offsetX));
}, { passive: false });
let held = null;
canvas.addEventListener("pointerdown", e => {
  held = { x: e.clientX, from: view.from, to: view.to };
  canvas.setPointerCapture(e.pointerId);
  canvas.classList.add("held");
});
canvas.addEventListener("pointerup", () => { held = null; canvas.classList.remove("held"); });
canvas.addEventListener("pointermove", e => {
  if (held) {
    const by = (held.x - e.clientX) / (wide - LEFT - 8) * (held.to - held.from);
    view.from = held.from + by; view.to = held.to + by;
    clamp();
    tip.hidden = true;
    soon();
    return;
  }
  const box = canvas.getBoundingClientRect();
  point(e.clientX - box.left, e.clientY - box.top, e.clientX, e.clientY);
});
canvas.addEventListener("pointerleave", () => { hover = null; tip.hidden = true; soon(); });
canvas.addEventListener("dblclick", e => zoom(.4, T(e.offsetX)));
canvas.addEventListener("keydown", e => {
  const act = { ArrowLeft: () => pan(-.15), ArrowRight: () => pan(.15), a: () => pan(-.15), d: () => pan(.15),
    "+": () => zoom(.7), "=": () => zoom(.7), w: () => zoom(.7), "-": () => zoom(1.4), s: () => zoom(1.4),
    "0": () => show(0, span), Home: () => show(0, span) }[e.key];
  if (act && !e.ctrlKey && !e.metaKey) { e.preventDefault(); act(); }
});
const near = (l, ns) => {
  const i = after(l.t, ns);
  if (!l.t.length) return null;
  if (i === 0 || i === l.t.length) return null;
  const a = l.t[i - 1] * unit, b = l.t[i] * unit, f = b > a ? (ns - a) / (b - a) : 0;
  return l.v[i - 1] * (1 - f) + l.v[i] * f;
};
const point = (px, py, x, at) => {
  hover = px >= LEFT ? px : null;
  soon();
  const track = tracks.find(t => py >= t.y - 2 && py <= t.y + t.h + 3), ns = T(px);
  if (!track || px < LEFT) { tip.hidden = true; return; }
  const when = `at ${time(ns, 7)}`;
  if (track.lines) {
    const lines = track.lines.map(l => {
      const v = near(l, ns);
      return v === null || Number.isNaN(v) ? "" : `${l.name}: ${+v.toPrecision(4)} ${l.unit}${l.basis === "measured" ? "" : " (" + l.basis + ")"}`;
    });
    const spike = track.kind === "power" && data.spikes.find(s => ns >= s.a && ns <= s.b);
    say(x, at, spike ? spike.t : when, spike ? [when, ...lines, ...spike.k] : lines);
  } else if (track.kind === "throttle") {
    const on = data.throttle.filter(([, a, b]) => ns >= a && ns <= b).map(t => t[0]);
    if (on.length) say(x, at, on.join(", "), [when]); else tip.hidden = true;
  } else {
    const { s, d, n, o, c, e } = track.lane, slack = 2 * (view.to - view.from) / wide;
    let k = after(s, ns + slack) - 1, found = -1;
    for (let tries = 0; k >= 0 && tries < 400; k--, tries++) if ((s[k] + d[k]) * unit >= ns - slack) { found = k; break; }
    if (found < 0) { tip.hidden = true; return; }
    const [short, full] = data.names[n[found]], length = d[found] * unit, j = e[found];
    const many = c[found] > 1;
    const what = track.lane.kind === "device" ? "kernels" : "regions";
    say(x, at, many ? `${c[found]} ${what}, most of the time ${short}` : full || short, [
      o[found] !== 65535 && `from ${data.names[o[found]][0]}`,
      `${time(length)} from ${time(s[found] * unit, 7)}`,
      !Number.isNaN(j) && (many ? joules(j) : `${joules(j)}, ${Math.round(j / (length * 1e-9))} W`),
    ]);
  }
};
const bind = (id, act) => { const b = document.getElementById(id); if (b) b.addEventListener("click", act); };
bind("zoom-in", () => zoom(.5));
bind("zoom-out", () => zoom(2));
bind("zoom-all", () => show(0, span));
bind("zoom-one", () => { const [a, b] = data.one, room = (b - a) * .04; show(a - room, b + room); });
new ResizeObserver(soon).observe(canvas);
drawn.push(draw);
draw();
performance.mark("tessera-first-plot");
};
if ($("#timeline")) later(() => timeline($("#timeline")));
