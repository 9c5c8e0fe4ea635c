// Draws the page's charts at the width they have, again when it changes. All text is set as text, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const live = document.querySelector(".live");
  const off = new Set(); // methods that are not shown
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  const BANDS = 4; // more of them hide each other
  const DASHES = ["7 3", "2 2", "9 3 2 3", "12 3", "5 2 1 2", "4 2", "1 3", "3 3"];

  // ---- small tools

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function draw(parent, tag, attributes = {}, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }

  function said(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
    return String(Number(value.toFixed(size < 1 ? 4 : size < 10 ? 3 : size < 1000 ? 2 : 0)));
  }

  const clipped = (text, most) => (text.length > most ? text.slice(0, Math.max(1, most - 1)) + "…" : text);
  const dash = (number) => (number === 0 || data.methods.length === 1 ? "" : DASHES[(number - 1) % DASHES.length]);
  const colour = (number) => `var(--c${number % 10})`;

  function place(chart, series, number) {
    const method = data.methods.indexOf(series.name);
    return method < 0 ? number : data.colours[method];
  }

  function shown(chart) {
    return chart.series
      .map((series, number) => ({ ...series, at: place(chart, series, number) }))
      .filter((series) => !off.has(series.name));
  }

  function ticks(low, high, most, whole) {
    const rough = Math.max((high - low) / Math.max(1, most), whole ? 1 : 0);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, whole && power < 10 ? 5 : 2.5, 5, 10].find((times) => times * power >= rough * 0.999);
    const made = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step)
      made.push(Number(value.toPrecision(12)));
    return made;
  }

  function span(values, share) {
    let low = Math.min(...values), high = Math.max(...values);
    if (low === high) { low -= Math.abs(low) * 0.05 || 0.5; high += Math.abs(high) * 0.05 || 0.5; }
    const room = (high - low) * share;
    return [low - room, high + room];
  }

  function canvas(box, width, height, label) {
    box.replaceChildren();
    const sheet = draw(box, "svg", {
      width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": label,
    });
    const tip = make("div", { class: "tip" });
    tip.hidden = true;
    box.append(tip);
    return { sheet, tip };
  }

  // ---- reading off: by pointer, touch or arrow keys; `stops` are the places along x that can be read

  function readable(box, sheet, tip, stops, tell, mark) {
    let now = -1;
    const show = (at, aloud) => {
      now = at;
      const stop = stops[at];
      mark(stop);
      tip.replaceChildren(...tell(stop));
      tip.hidden = false;
      const room = box.scrollLeft + box.clientWidth - tip.offsetWidth - 4;
      const left = stop.x + 14 > room ? stop.x - tip.offsetWidth - 14 : stop.x + 14;
      tip.style.left = `${Math.max(box.scrollLeft, left)}px`;
      tip.style.top = `${Math.max(0, Math.min((stop.y ?? 20) - 10, sheet.clientHeight - tip.offsetHeight))}px`;
      if (aloud) live.textContent = tip.innerText;
    };
    const hide = () => { tip.hidden = true; mark(null); };
    const nearest = (event) => {
      const frame = sheet.getBoundingClientRect();
      const x = event.clientX - frame.left, y = event.clientY - frame.top;
      let best = 0, least = Infinity;
      stops.forEach((stop, at) => {
        const far = Math.abs(stop.x - x) + (stop.y === undefined ? 0 : Math.abs(stop.y - y));
        if (far < least) { least = far; best = at; }
      });
      return best;
    };
    if (!stops.length) return;
    sheet.addEventListener("pointermove", (event) => show(nearest(event)));
    sheet.addEventListener("pointerdown", (event) => show(nearest(event)));
    sheet.addEventListener("pointerleave", hide);
    sheet.addEventListener("blur", hide);
    sheet.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") return hide();
      if (event.key === "Home") now = 0;
      else if (event.key === "End") now = stops.length - 1;
      else if (move) now = Math.max(0, Math.min(stops.length - 1, now + move));
      else return;
      event.preventDefault();
      show(now, true);
    });
  }

  function line(name, value, number) {
    const row = make("div");
    if (number !== undefined) row.append(Object.assign(make("i"), { style: `background:${colour(number)}` }));
    row.append(`${name}: ${value}`);
    return row;
  }

  const ranged = (series, at) =>
    said(series.y[at]) + (series.low ? ` (${said(series.low[at])} to ${said(series.high[at])})` : "");

  // ---- axes

  function frame(sheet, chart, size, x, y, marks) {
    const { left, right, top, bottom, width, height } = size;
    for (const value of ticks(...y.domain, height < 300 ? 5 : 8)) {
      draw(sheet, "line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) });
      draw(sheet, "text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, said(value));
    }
    const turned = marks.some((mark) => mark.name.length * 7 > (width - left - right) / Math.max(1, marks.length));
    for (const mark of marks) {
      const at = { x: x(mark.value), y: height - bottom + 16, "text-anchor": "middle" };
      if (turned && chart.ticks?.length) {
        at["text-anchor"] = "end";
        at.transform = `rotate(-40 ${at.x} ${at.y})`;
      }
      draw(sheet, "text", at, clipped(mark.name, 24));
    }
    draw(sheet, "line", { class: "grid", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom });
    if (chart.x) draw(sheet, "text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, clipped(chart.x, Math.floor((width - left) / 7)));
    draw(sheet, "text", { x: 2, y: 11 }, clipped(chart.y, Math.floor(width / 6.5)));
  }

  function scale(domain, from, to) {
    const map = (value) => from + ((value - domain[0]) / (domain[1] - domain[0])) * (to - from);
    return Object.assign(map, { domain });
  }

  function room(box, chart, names) {
    const width = Math.max(box.clientWidth, 240, 18 * names.length);
    const long = names.some((name) => name.length * 7 > (width - 60) / Math.max(1, names.length));
    const deep = long ? 12 + 4.6 * Math.min(24, Math.max(...names.map((name) => name.length))) : 20;
    const height = (width < 460 ? 250 : 320) + (long ? deep - 20 : 0);
    return { width, height, left: 52, right: 14, top: 22, bottom: deep + (chart.x ? 22 : 6) };
  }

  // ---- the kinds of charts

  function lines(box, chart) {
    const seen = shown(chart);
    const size = room(box, chart, chart.ticks);
    if (chart.diagonal) size.height = Math.min(size.width, 460);
    const ends = seen.map((series) => `${series.name} ${said(series.y.at(-1))}`).join(", ");
    const { sheet, tip } = canvas(box, size.width, size.height, `${chart.y} against ${chart.x || "method"}. Last values: ${ends}`);
    const xs = seen.flatMap((series) => series.x);
    const ys = seen.flatMap((series) => [...series.y, ...(series.low || []), ...(series.high || [])]);
    if (!xs.length) { draw(sheet, "text", { x: size.left, y: 60 }, "No method is selected."); return; }
    const named = chart.ticks.length > 0;
    const across = chart.diagonal ? [0, 2.05] : named ? [-0.5, chart.ticks.length - 0.5] : span(xs, 0);
    const x = scale(across, size.left, size.width - size.right);
    const y = scale(chart.diagonal ? [0, 2.05] : span(ys, 0.06), size.height - size.bottom, size.top);
    const marks = named
      ? chart.ticks.map((name, value) => ({ name, value }))
      : ticks(...across, size.width < 460 ? 4 : 8, xs.every(Number.isInteger)).map((value) => ({ name: said(value), value }));
    frame(sheet, chart, size, x, y, marks);
    if (chart.diagonal) draw(sheet, "line", { class: "cross", x1: x(0), y1: y(0), x2: x(2), y2: y(2) });
    const shift = (order) => (chart.joined || chart.diagonal ? 0 : (order - (seen.length - 1) / 2) * Math.min(6, 40 / seen.length));
    seen.forEach((series, order) => {
      const points = series.x.map((value, at) => [x(value) + shift(order), y(series.y[at])]);
      const paint = colour(series.at);
      if (chart.joined && points.length > 1) {
        if (series.low && seen.length <= BANDS) {
          const up = series.x.map((value, at) => `${x(value)},${y(series.high[at])}`);
          const down = series.x.map((value, at) => `${x(value)},${y(series.low[at])}`).reverse();
          draw(sheet, "polygon", { points: [...up, ...down].join(" "), fill: paint, opacity: 0.15 });
        }
        draw(sheet, "polyline", {
          class: "line", points: points.map((each) => each.join(",")).join(" "), fill: "none", stroke: paint,
          "stroke-width": 2, "stroke-dasharray": dash(series.at), "stroke-linejoin": "round",
        });
      } else if (series.low) {
        series.x.forEach((value, at) =>
          draw(sheet, "line", { x1: points[at][0], x2: points[at][0], y1: y(series.low[at]), y2: y(series.high[at]), stroke: paint, "stroke-width": 1.5 }));
      }
      if (points.length <= 12 || !chart.joined)
        for (const [cx, cy] of points)
          if (chart.diagonal && order) draw(sheet, "path", { d: star(cx, cy, 9), fill: paint });
          else draw(sheet, "circle", { cx, cy, r: 4, fill: paint });
    });
    const cross = draw(sheet, "line", { class: "cross", y1: size.top, y2: size.height - size.bottom, visibility: "hidden" });
    let stops;
    if (chart.diagonal) {
      stops = seen.flatMap((series) => series.x.map((value, at) => ({ x: x(value), y: y(series.y[at]), of: [[series, at]], title: series.name })));
    } else {
      const values = [...new Set(xs)].sort((a, b) => a - b);
      stops = values.map((value) => ({
        x: x(value),
        title: named ? chart.ticks[value] : `${chart.x} ${said(value)}`,
        of: seen.map((series) => [series, closest(series.x, value)]),
      }));
    }
    readable(box, sheet, tip, stops,
      (stop) => [
        make("b", {}, stop.title),
        ...[...stop.of].sort((a, b) => b[0].y[b[1]] - a[0].y[a[1]]).map(([series, at]) =>
          line(series.name, chart.diagonal ? `${said(series.x[at])}, ${said(series.y[at])}` : ranged(series, at), series.at)),
      ],
      (stop) => {
        cross.setAttribute("visibility", stop ? "visible" : "hidden");
        if (stop) { cross.setAttribute("x1", stop.x); cross.setAttribute("x2", stop.x); }
      });
  }

  function closest(values, value) {
    let best = 0;
    values.forEach((each, at) => { if (Math.abs(each - value) < Math.abs(values[best] - value)) best = at; });
    return best;
  }

  function star(cx, cy, r) {
    const points = [];
    for (let at = 0; at < 10; at++) {
      const angle = (at * Math.PI) / 5 - Math.PI / 2, far = at % 2 ? r * 0.42 : r;
      points.push(`${cx + far * Math.cos(angle)},${cy + far * Math.sin(angle)}`);
    }
    return `M${points.join("L")}Z`;
  }

  function bars(box, chart) {
    const seen = shown(chart);
    const size = room(box, chart, chart.groups);
    size.width = Math.max(size.width, size.left + size.right + chart.groups.length * (8 * seen.length + 10));
    const { sheet, tip } = canvas(box, size.width, size.height, `${chart.y} by ${chart.groups.join(", ")}`);
    const tops = seen.flatMap((series) => series.high || series.y);
    const y = scale([0, Math.max(...tops, 1e-9) * 1.05], size.height - size.bottom, size.top);
    const x = scale([-0.5, chart.groups.length - 0.5], size.left, size.width - size.right);
    frame(sheet, { ...chart, ticks: chart.groups }, size, x, y, chart.groups.map((name, value) => ({ name, value })));
    const wide = ((size.width - size.left - size.right) / chart.groups.length) * 0.82;
    const each = Math.min(46, wide / Math.max(1, seen.length));
    seen.forEach((series, order) =>
      series.x.forEach((group, at) => {
        const left = x(group) + (order - seen.length / 2) * each;
        draw(sheet, "rect", { class: "bar", x: left + 0.5, width: Math.max(1, each - 1), y: y(series.y[at]), height: Math.max(0, y(0) - y(series.y[at])), fill: colour(series.at), rx: 1.5 });
        if (series.low) draw(sheet, "line", { x1: left + each / 2, x2: left + each / 2, y1: y(series.low[at]), y2: y(series.high[at]), stroke: "var(--ink)", "stroke-width": 1.3 });
      }));
    const stops = chart.groups.map((title, value) => ({
      x: x(value), title,
      of: seen.map((series) => [series, series.x.indexOf(value)]).filter(([, at]) => at >= 0),
    }));
    readable(box, sheet, tip, stops,
      (stop) => [make("b", {}, stop.title), ...stop.of.map(([series, at]) => line(series.name, ranged(series, at), series.at))],
      () => {});
  }

  function heatmap(box, chart) {
    const longest = Math.max(...chart.rows.map((name) => name.length));
    const left = Math.min(box.clientWidth * 0.3, 14 + 7 * Math.min(longest, 22));
    const most = Math.floor((left - 10) / 7);
    const cell = Math.max(16, Math.min(84, (Math.max(box.clientWidth, 240) - left - 8) / chart.columns.length));
    const tall = Math.max(15, Math.min(cell, chart.rows.length > 12 ? 22 : 46));
    const turned = chart.columns.some((name) => name.length * 7 > cell);
    const deep = turned ? 18 + 5 * Math.min(18, Math.max(...chart.columns.map((name) => name.length))) : 24;
    const width = left + cell * chart.columns.length + 8 + (turned ? 6 : 0), height = 6 + tall * chart.rows.length + deep;
    const { sheet, tip } = canvas(box, width, height, `${chart.title}: ${chart.rows.length} rows, ${chart.columns.length} columns; arrow keys read the cells`);
    const turn = dark.matches && !printing ? 0.6 : 0.8; // where the other colour of text is the clearer one
    const stops = [];
    chart.rows.forEach((row, r) => {
      const name = draw(sheet, "text", { x: left - 6, y: 6 + tall * (r + 0.5) + 4, "text-anchor": "end" }, clipped(row, most));
      draw(name, "title", {}, row);
      chart.columns.forEach((column, c) => {
        const value = chart.values[r][c];
        const share = value === null ? 0 : Math.max(0, Math.min(1, (value - chart.low) / (chart.high - chart.low || 1)));
        const part = chart.unit ? Math.sqrt(share) : share; // counts: small ones are to be seen too
        const x = left + cell * c, y = 6 + tall * r;
        draw(sheet, "rect", { class: "heat", x: x + 1, y: y + 1, width: cell - 2, height: tall - 2, rx: 2,
          fill: value === null ? "none" : `color-mix(in oklab, var(--heat) ${(100 * part).toFixed(1)}%, var(--paper))` });
        const text = value === null ? "" : chart.unit ? String(value) : chart.high > 10 ? value.toFixed(0) : value.toFixed(2);
        if (text && text.length * 7.4 < cell) draw(sheet, "text", { class: part > turn ? "cell on" : "cell", x: x + cell / 2, y: y + tall / 2 + 4, "text-anchor": "middle" }, text);
        stops.push({ x: x + cell / 2, y: y + tall / 2, row, column, value });
      });
    });
    chart.columns.forEach((column, c) => {
      const at = { x: left + cell * (c + 0.5), y: 6 + tall * chart.rows.length + 14, "text-anchor": turned ? "end" : "middle" };
      if (turned) at.transform = `rotate(-45 ${at.x} ${at.y})`;
      draw(sheet, "text", at, clipped(column, 18));
    });
    const outline = draw(sheet, "rect", { fill: "none", stroke: "var(--ink)", width: cell - 2, height: tall - 2, visibility: "hidden" });
    readable(box, sheet, tip, stops,
      (stop) => [make("b", {}, `${stop.row}, ${stop.column}`), line(chart.unit || "value", said(stop.value))],
      (stop) => {
        outline.setAttribute("visibility", stop ? "visible" : "hidden");
        if (stop) { outline.setAttribute("x", stop.x - cell / 2 + 1); outline.setAttribute("y", stop.y - tall / 2 + 1); }
      });
  }

  function scatter(box, chart, figure) {
    const width = Math.max(box.clientWidth, 240), height = Math.min(width * 0.75, 420);
    const { sheet, tip } = canvas(box, width, height, `${chart.title}: ${chart.points.length} points of ${chart.groups.join(", ")}`);
    const x = scale(span(chart.points.map((point) => point[0]), 0.03), 6, width - 6);
    const y = scale(span(chart.points.map((point) => point[1]), 0.03), height - 6, 6);
    const stops = [];
    for (const [px, py, group] of chart.points) {
      if (figure.without.has(chart.groups[group])) continue;
      draw(sheet, "circle", { class: "point", cx: x(px), cy: y(py), r: 3, fill: colour(group), opacity: 0.65 });
      stops.push({ x: x(px), y: y(py), group });
    }
    const ring = draw(sheet, "circle", { r: 6, fill: "none", stroke: "var(--ink)", visibility: "hidden" });
    readable(box, sheet, tip, stops,
      (stop) => [line(chart.groups[stop.group], "", stop.group)],
      (stop) => {
        ring.setAttribute("visibility", stop ? "visible" : "hidden");
        if (stop) { ring.setAttribute("cx", stop.x); ring.setAttribute("cy", stop.y); }
      });
  }

  const KINDS = { lines, bars, heatmap, scatter };

  // ---- the numbers of a chart as a table

  function table(chart) {
    if (chart.kind === "heatmap") return [["", ...chart.columns], ...chart.rows.map((row, r) => [row, ...chart.values[r].map(said)])];
    if (chart.kind === "scatter") return [["x", "y", "group"], ...chart.points.map(([x, y, group]) => [said(x), said(y), chart.groups[group]])];
    const names = chart.kind === "bars" ? chart.groups : chart.ticks;
    if (chart.diagonal) return [["", chart.x, chart.y], ...chart.series.flatMap((s) => s.x.map((x, at) => [s.name, said(x), said(s.y[at])]))];
    const xs = [...new Set(chart.series.flatMap((series) => series.x))].sort((a, b) => a - b);
    return [
      [chart.x || "", ...chart.series.map((series) => series.name)],
      ...xs.map((x) => [names.length ? names[x] : said(x), ...chart.series.map((series) => (series.x.includes(x) ? ranged(series, series.x.indexOf(x)) : ""))]),
    ];
  }

  function asTable(rows) {
    const [head, ...body] = rows;
    return make("table", {},
      make("thead", {}, make("tr", {}, ...head.map((cell) => make("th", { scope: "col" }, cell)))),
      make("tbody", {}, ...body.map(([name, ...cells]) => make("tr", {}, make("th", { scope: "row" }, name), ...cells.map((cell) => make("td", {}, cell))))));
  }

  // ---- putting it together

  function key(number, name) {
    const button = make("button", { type: "button", "aria-pressed": "true" });
    const sample = draw(button, "svg", { viewBox: "0 0 26 12", "aria-hidden": "true" });
    return { button, sample, name, paint: colour(number), number };
  }

  const figures = [...document.querySelectorAll("figure.chart")].map((node) => {
    const figure = { node, ...data.figures[Number(node.dataset.figure)], without: new Set(), chosen: 0 };
    const box = node.querySelector(".plot"), legend = node.querySelector(".legend"), numbers = node.querySelector(".numbers");
    const caption = node.querySelector("figcaption");
    const chart = () => figure.choices[figure.chosen];
    figure.redraw = () => KINDS[chart().kind](box, chart(), figure);
    const tabulate = () => {
      numbers.querySelector("table")?.remove();
      if (numbers.open) numbers.append(asTable(table(chart())));
    };
    figure.dress = () => {
      if (figure.choices.length > 1) caption.dataset.chosen = chart().name;
      legend.replaceChildren();
      const own = chart().kind === "scatter" ? chart().groups
        : (chart().series || []).map((series) => series.name).filter((name) => !data.methods.includes(name));
      if (!own.length || own.length > 60) return;
      own.forEach((name, number) => {
        const each = key(number, name);
        draw(each.sample, "circle", { cx: 13, cy: 6, r: 5, fill: each.paint });
        each.button.append(name);
        if (chart().kind !== "scatter") { each.button.disabled = true; each.button.removeAttribute("aria-pressed"); }
        each.button.addEventListener("click", () => {
          if (!figure.without.delete(name)) figure.without.add(name);
          each.button.setAttribute("aria-pressed", String(!figure.without.has(name)));
          figure.redraw();
        });
        if (figure.without.has(name)) each.button.setAttribute("aria-pressed", "false");
        legend.append(each.button);
      });
    };
    node.querySelector("select")?.addEventListener("change", (event) => {
      figure.chosen = Number(event.target.value);
      figure.dress();
      figure.redraw();
      tabulate();
    });
    numbers.addEventListener("toggle", tabulate);
    figure.dress();
    let width = 0;
    new ResizeObserver(() => {
      if (box.clientWidth && box.clientWidth !== width) { width = box.clientWidth; figure.redraw(); }
    }).observe(box);
    return figure;
  });

  // A table that is wider than the screen says so above it.
  const fits = new ResizeObserver((seen) => {
    for (const { target } of seen) target.previousElementSibling.toggleAttribute("data-more", target.scrollWidth > target.clientWidth);
  });
  for (const box of document.querySelectorAll("main .table")) fits.observe(box);

  const again = () => figures.forEach((figure) => figure.redraw());
  dark.addEventListener("change", again);
  addEventListener("beforeprint", () => { printing = true; again(); });
  addEventListener("afterprint", () => { printing = false; again(); });

  const bar = document.querySelector(".methods");
  if (data.methods.length > 1) {
    bar.hidden = false;
    data.methods.forEach((name, at) => {
      const number = data.colours[at], each = key(number, name);
      draw(each.sample, "line", { x1: 1, x2: 25, y1: 6, y2: 6, stroke: each.paint, "stroke-width": 3, "stroke-dasharray": dash(number) });
      each.button.append(name);
      each.button.addEventListener("click", () => {
        if (!off.delete(name)) off.add(name);
        each.button.setAttribute("aria-pressed", String(!off.has(name)));
        again();
      });
      bar.append(each.button);
    });
  }
})();
