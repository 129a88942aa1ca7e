
// Round numbers that divide a range into about `count` steps.
function ticks(low, high, count, integers) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = power * ([1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999) || 10);
  if (integers) step = Math.max(1, Math.round(step));
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) found.push(place * step);
  return found.map((tick) => Number(tick.toPrecision(12)));
}

function showTip(event, text) {
  const box = $("tip");
  box.textContent = text;
  box.hidden = false;
  const bounds = box.getBoundingClientRect();
  const left = Math.min(event.clientX + 12, innerWidth - bounds.width - 8);
  const top = event.clientY - bounds.height - 10;
  box.style.left = `${Math.max(4, left)}px`;
  box.style.top = `${top < 4 ? event.clientY + 16 : top}px`;
}

function hideTip() {
  $("tip").hidden = true;
}

function tip(text) {
  const show = (event) => showTip(event, text);
  return { onpointermove: show, onpointerenter: show, onpointerleave: hideTip };
}

function card(title, caption, parts, span) {
  return make("figure", { class: `card span-${span}` }, make("h3", {}, title), make("figcaption", {}, caption), parts);
}

// Charts in rows of six columns. Each wants a number of columns; the last ones of a row get what would stay empty.
function arranged(charts) {
  const rows = [[]];
  let used = 0;
  for (const chart of charts) {
    const span = innerWidth <= 760 ? 6 : innerWidth <= 1100 && chart.span < 6 ? 3 : chart.span;
    if (used + span > 6) {
      rows.push([]);
      used = 0;
    }
    rows[rows.length - 1].push(chart.draw);
    used += span;
  }
  return rows.flatMap((row) => row.map((draw) => draw(6 / row.length)));
}

function asTable(heads, rows, caption) {
  return make("details", {}, make("summary", {}, "Table"), table(heads, rows, caption));
}

// Charts are drawn as wide as their card is, so that their text is as large as that of the page.
function room(span) {
  const all = $("charts").clientWidth, gap = 16, inside = 34, columns = innerWidth <= 760 ? 1 : 6 / span;
  return Math.max(240, Math.floor((all - gap * (columns - 1)) / columns) - inside);
}

const MARGIN = { left: 46, right: 12, top: 10, bottom: 36 };

function frame(width, height, label, { x, y, xLabel, yLabel, xFormat = number, yFormat = big }) {
  const bottom = height - MARGIN.bottom;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const tick of y.ticks) {
    svg.append(make("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
      make("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, yFormat(tick)));
  }
  svg.append(make("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }));
  for (const tick of x.ticks) {
    svg.append(make("line", { class: "axis", x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4 }),
      make("text", { x: x(tick), y: bottom + 16, "text-anchor": "middle" }, xFormat(tick)));
  }
  svg.append(make("text", { x: width - MARGIN.right, y: height - 4, "text-anchor": "end" }, xLabel),
    make("text", { x: 2, y: 10 }, yLabel));
  return svg;
}

function scale(low, high, from, to, marks) {
  const place = (value) => (high > low ? from + ((value - low) / (high - low)) * (to - from) : (from + to) / 2);
  place.ticks = marks;
  return place;
}

// No chart of nothing: what is null is left out.
function histogram(title, data, { unit, of = "trajectories", format = number, span = 2 }) {
  return data.count ? { span, draw: (given) => histogramCard(title, data, { unit, of, format, span: given }) } : null;
}

function histogramCard(title, data, { unit, of, format, span }) {
  const caption = `mean ${format(data.mean)}, median ${format(data.median)}, 90 % up to ${format(data.p90)}, range ${format(data.min)} to ${format(data.max)}`;
  const lost = data.nonfinite ? `; ${number(data.nonfinite)} not finite, left out` : "";
  const width = room(span), height = span > 2 ? 240 : 210, bottom = height - MARGIN.bottom;
  const single = data.bars.every(([low, high]) => low === high);
  const values = data.bars.map(([low]) => low);
  const gaps = values.slice(1).map((value, place) => value - values[place]);
  let gap = gaps.length ? Math.min(...gaps) : Math.abs(values[0]) || 1;
  // Values closer than a bar is wide would hide one another.
  const reach = values[values.length - 1] - values[0];
  if (single && reach / gap > 60) gap = reach / 60;
  const low = single ? values[0] - gap * 0.6 : values[0];
  const high = single ? values[values.length - 1] + gap * 0.6 : data.bars[data.bars.length - 1][1];
  const most = Math.max(...data.bars.map((bar) => bar[2]));
  const space = width - MARGIN.left - MARGIN.right;
  const few = single && values.length <= 8;
  const marks = few ? values : ticks(low, high, width / 80, data.whole);
  const x = scale(low, high, MARGIN.left, width - MARGIN.right, marks);
  const y = scale(0, most, bottom, MARGIN.top + 12, ticks(0, most, 4, true));
  const name = (bar) => (single ? format(bar[0])
    : data.whole ? `${number(bar[0])}–${number(bar[1] - 1)}` : `${format(bar[0])} to ${format(bar[1])}`);
  const svg = frame(width, height, `${title}: ${caption}`, { x, y, xLabel: unit, yLabel: of, xFormat: number });
  const wideBar = single ? Math.max(2, Math.min(44, (gap / (high - low)) * space * 0.75)) : 0;
  for (const bar of data.bars) {
    const left = single ? x(bar[0]) - wideBar / 2 : x(bar[0]) + 0.5;
    const across = single ? wideBar : Math.max(1, x(bar[1]) - x(bar[0]) - 1);
    const text = `${name(bar)}\n${number(bar[2])} ${of} (${percent(bar[2], data.count)})`;
    svg.append(make("rect", { class: "bar", x: left, width: across, y: y(bar[2]), height: bottom - y(bar[2]) }));
    if (few && values.length <= 6) svg.append(make("text", { class: "value", x: x(bar[0]), y: y(bar[2]) - 4, "text-anchor": "middle" }, percent(bar[2], data.count)));
    svg.append(make("rect", { class: "hit", x: left, width: across, y: MARGIN.top, height: bottom - MARGIN.top, ...tip(text) }));
  }
  if (!few) svg.append(make("line", { class: "mean", x1: x(data.mean), x2: x(data.mean), y1: MARGIN.top + 6, y2: bottom }),
    make("text", { x: x(data.mean) + (x(data.mean) > width * 0.75 ? -4 : 4), y: MARGIN.top + 8, "text-anchor": x(data.mean) > width * 0.75 ? "end" : "start" }, "mean"));
  const rows = data.bars.map((bar) => [name(bar), number(bar[2]), percent(bar[2], data.count)]);
  return card(title, caption + lost, [svg, asTable([{ name: unit }, { name: of, n: true }, { name: "share", n: true }], rows, title)], span);
}

function signal(groups) {
  return groups.groups ? { span: 3, draw: (span) => signalCard(groups, span) } : null;
}

function signalCard(groups, span) {
  const title = "Learning signal: rewards within prompt groups";
  const caption = `${number(groups.groups)} groups, mean std ${number(groups.mean_std)}; ${percent(groups.equal, groups.groups)} without signal`
    + (groups.equal ? ` (${number(groups.highest)} all at the highest reward, ${number(groups.lowest)} all at the lowest)` : "");
  const width = room(span), height = 240, bottom = height - MARGIN.bottom;
  const means = groups.points.map((point) => point[0]);
  let low = Math.min(...means), high = Math.max(...means);
  const pad = (high - low || 1) * 0.05;
  [low, high] = [low - pad, high + pad];
  const top = Math.max(...groups.points.map((point) => point[1])) || 1;
  const most = Math.max(...groups.points.map((point) => point[2]));
  const x = scale(low, high, MARGIN.left, width - MARGIN.right, ticks(low, high, width / 80));
  const y = scale(0, top, bottom - 12, MARGIN.top + 20, ticks(0, top, 4));
  const svg = frame(width, height, `${title}: ${caption}`, { x, y, xLabel: "mean reward of the group", yLabel: "std of its rewards", yFormat: number });
  const largest = Math.min(15, 5 + Math.sqrt(most));
  for (const [mean, std, count] of [...groups.points].sort((one, two) => two[2] - one[2])) {
    const text = `${number(count)} groups (${percent(count, groups.groups)})\nmean ${number(mean)}, std ${number(std)}`;
    svg.append(make("circle", { class: std ? "point" : "point equal", cx: x(mean), cy: y(std), r: Math.max(2.5, Math.sqrt(count / most) * largest), ...tip(text) }));
  }
  const legend = make("p", { class: "legend" }, make("span", {}, make("i"), "rewards differ"), make("span", {}, make("i", { class: "second" }), "all equal: no signal"), make("span", {}, "area: number of groups"));
  const rows = groups.points.map(([mean, std, count]) => [number(mean), number(std), number(count)]);
  return card(title, caption, [svg, legend, asTable([{ name: "mean", n: true }, { name: "std", n: true }, { name: "groups", n: true }], rows, title)], span);
}

function bars(title, caption, unit, lines, span = 2) {
  return lines.length ? { span, draw: (given) => barsCard(title, caption, unit, lines, given) } : null;
}

function barsCard(title, caption, unit, lines, span) {
  const width = room(span), line = 30, height = lines.length * line + 8;
  const most = Math.max(1, ...lines.map((item) => item.value));
  const all = lines.reduce((sum, item) => sum + item.value, 0);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${lines.map((item) => `${item.name} ${item.value}`).join(", ")}` });
  lines.forEach((item, place) => {
    const top = place * line + 4, wide = Math.max(item.value ? 2 : 0, (item.value / most) * (width - 205));
    svg.append(make("text", { x: 0, y: top + 15 }, item.name.length > 14 ? `${item.name.slice(0, 13)}…` : item.name),
      make("rect", { class: item.style || "bar", x: 92, y: top + 3, width: wide, height: 16 }),
      make("text", { class: "value", x: 98 + wide, y: top + 15 }, `${number(item.value)}  (${percent(item.value, all)})`),
      make("rect", { class: "hit", x: 0, y: top, width, height: line - 6, ...tip(`${item.name}: ${number(item.value)} ${unit}${item.more ? `\n${item.more}` : ""}`) }));
  });
  return card(title, caption, [svg], span);
}

// Where the time of trajectories went, one line for each environment.
function times(lines) {
  return lines.some((line) => line.finished) ? { span: 2, draw: (span) => timesCard(lines, span) } : null;
}

function timesCard(lines, span) {
  const title = "Where the time went";
  const total = (line) => line.generation_seconds.total + line.environment_seconds.total;
  const shown = lines.filter((line) => line.finished);
  const generation = shown.reduce((sum, line) => sum + line.generation_seconds.total, 0);
  const world = shown.reduce((sum, line) => sum + line.environment_seconds.total, 0);
  const caption = `generation ${seconds(generation)} (${percent(generation, generation + world)}), environments ${seconds(world)} (${percent(world, generation + world)}), each trajectory's own seconds added up`;
  const width = room(span), line = 44, height = shown.length * line + 4;
  const most = Math.max(...shown.map((item) => total(item) / item.finished)) || 1;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${caption}` });
  shown.forEach((item, place) => {
    const top = place * line + 2, mean = (name) => item[name].total / item.finished;
    const first = (mean("generation_seconds") / most) * (width - 140), second = (mean("environment_seconds") / most) * (width - 140);
    const text = `${item.name || "all"}\ngeneration ${seconds(mean("generation_seconds"))} a trajectory\nenvironment ${seconds(mean("environment_seconds"))} a trajectory`;
    svg.append(make("text", { x: 0, y: top + 12 }, (item.name || "all").slice(0, 60)),
      make("rect", { class: "bar", x: 0, y: top + 18, width: first, height: 16 }),
      make("rect", { class: "second", x: first, y: top + 18, width: Math.max(second, second ? 1 : 0), height: 16 }),
      make("text", { class: "value", x: first + second + 6, y: top + 30 }, `${seconds(total(item) / item.finished)} a trajectory`),
      make("rect", { class: "hit", x: 0, y: top, width, height: line - 4, ...tip(text) }));
  });
  const legend = make("p", { class: "legend" }, make("span", {}, make("i"), "generation, its waiting for the engine included"), make("span", {}, make("i", { class: "second" }), "environment"));
  const rows = shown.map((item) => [item.name || "all", seconds(item.generation_seconds.total), seconds(item.environment_seconds.total), seconds(total(item) / item.finished)]);
  return card(title, caption, [svg, legend, asTable([{ name: "environment" }, { name: "generation", n: true }, { name: "environment", n: true }, { name: "a trajectory", n: true }], rows, title)], span);
}

function failures(numbers) {
  const failed = ended(numbers, "failed");
  if (!failed) return null;
  const rows = numbers.causes.map(([kind, stage, cause, count]) => [number(count), kind, stage, cause]);
  if (numbers.other_causes) rows.push([number(numbers.other_causes), "", "", "other causes"]);
  return { span: 6, draw: (span) => card("Failures by cause", `${number(failed)} trajectories were given up; they are in no other number`,
    table([{ name: "count", n: true }, { name: "kind" }, { name: "stage" }, { name: "cause" }], rows, "Failures by cause"), span) };
}

// Tokens and turns a second, and trajectories in flight, over the time in which the run was at work.
function throughput(stretches, distance) {
  return stretches.length ? { span: 6, draw: (span) => throughputCard(stretches, distance, span) } : null;
}

// How far the run was from what no schedule could better, and where that time went.
function distanceText(distance) {
  const least = Math.min(0.05, distance.seconds / 20);
  const lost = [["tail", "tail"], ["environment", "environments"], ["other", "other causes"]].map(([name, label]) => [distance[`${name}_seconds`], label])
    .filter(([seconds]) => seconds >= least).map(([seconds, label]) => `${elapsed(seconds)} ${label}`);
  return `${distance.over_bound.toFixed(2)} × the bound: ${elapsed(distance.work_seconds)} at full speed, longest trajectory ${elapsed(distance.longest_seconds)}`
    + (lost.length ? `; lost: ${lost.join(", ")}` : "");
}

function throughputCard(stretches, distance, span) {
  const title = "Throughput over time", width = room(span), pause = 22;
  const worked = stretches.reduce((sum, stretch) => sum + stretch.end - stretch.start, 0);
  const space = width - MARGIN.left - MARGIN.right - pause * (stretches.length - 1);
  const points = stretches.flatMap((stretch, number) => {
    const before = stretches.slice(0, number).reduce((sum, other) => sum + other.end - other.start, 0);
    return stretch.tokens.map((tokens, place) => {
      const from = stretch.start + place * stretch.seconds, to = Math.min(stretch.end, from + stretch.seconds);
      const x = (time) => MARGIN.left + ((before + time - stretch.start) / worked) * space + pause * number;
      return { number, left: x(from), right: x(to), from: before + from - stretch.start, seconds: to - from, tokens, turns: stretch.turns[place], busy: stretch.busy[place] };
    });
  });
  const total = (name) => points.reduce((sum, point) => sum + point[name] * point.seconds, 0);
  const most = Math.max(...points.map((point) => point.busy));
  const caption = `mean ${big(total("tokens") / worked)} tokens/s and ${number(total("turns") / worked)} turns/s over ${elapsed(worked)}; `
    + `up to ${number(Math.round(most))} trajectories in flight: waiting for a response or an environment. Finished trajectories only`
    + (stretches.length > 1 ? `; ${number(stretches.length - 1)} ${stretches.length > 2 ? "pauses" : "pause"} left out` : "")
    + (distance ? `. ${distanceText(distance)}` : "");
  const panels = [["tokens", "tokens/s"], ["turns", "turns/s"], ["busy", "in flight"]];
  const panel = 92, height = panels.length * panel + 26;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${caption}` });
  panels.forEach(([name, label], row) => {
    const top = row * panel + 18, bottom = (row + 1) * panel - 6, peak = Math.max(...points.map((point) => point[name])) || 1;
    const y = scale(0, peak, bottom, top, ticks(0, peak, 3));
    for (const tick of y.ticks) {
      svg.append(make("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
        make("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, big(tick)));
    }
    svg.append(make("text", { x: 2, y: top - 6 }, label));
    stretches.forEach((_, number) => {
      const own = points.filter((point) => point.number === number);
      const line = own.map((point) => `V${y(point[name]).toFixed(1)}H${point.right.toFixed(1)}`).join("");
      svg.append(make("path", { class: row === 2 ? "area other" : "area", d: `M${own[0].left.toFixed(1)},${bottom}${line}V${bottom}Z` }));
    });
    svg.append(make("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }));
  });
  const end = panels.length * panel;
  stretches.slice(1).forEach((stretch, number) => {
    const x = points.find((point) => point.number === number + 1).left - pause / 2;
    svg.append(make("line", { class: "mean", x1: x, x2: x, y1: 8, y2: end - 6 }),
      make("rect", { class: "hit", x: x - pause / 2, y: 0, width: pause, height: end, ...tip(`paused for ${elapsed(stretch.start - stretches[number].end)}`) }));
  });
  const at = (time) => points.find((point) => time <= point.from + point.seconds + 1e-9) || points[points.length - 1];
  for (const tick of clockTicks(worked, width / 90)) {
    const point = at(tick), x = point.left + (Math.min(1, (tick - point.from) / point.seconds)) * (point.right - point.left);
    svg.append(make("text", { x: Math.min(Math.max(x, MARGIN.left + 4), width - MARGIN.right - 8), y: end + 10, "text-anchor": "middle" }, elapsed(tick)));
  }
  svg.append(make("text", { x: width - MARGIN.right, y: height - 2, "text-anchor": "end" }, "time since the first turn began"));
  const text = (point) => `${elapsed(point.from)} to ${elapsed(point.from + point.seconds)}\n${number(point.tokens)} tokens/s\n${number(point.turns)} turns/s\n${number(point.busy)} in flight`;
  for (const point of points) {
    svg.append(make("rect", { class: "hit", x: point.left, width: Math.max(0.5, point.right - point.left), y: 0, height: end, ...tip(text(point)) }));
  }
  const rows = points.map((point) => [elapsed(point.from), number(point.tokens), number(point.turns), number(point.busy)]);
  return card(title, caption, [svg, asTable([{ name: "from" }, { name: "tokens/s", n: true }, { name: "turns/s", n: true }, { name: "in flight", n: true }], rows, title)], span);
}

// A period as h:mm:ss, with tenths below ten seconds.
function elapsed(value) {
  if (value < 10) return `${Number(value.toFixed(1))} s`;
  const all = Math.round(value), hours = Math.floor(all / 3600), minutes = Math.floor((all % 3600) / 60), rest = String(all % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

function clockTicks(length, count) {
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400];
  const step = steps.find((candidate) => length / candidate <= count) || Math.ceil(length / count / 86400) * 86400;
  return Array.from({ length: Math.floor(length / step + 1e-9) + 1 }, (_, place) => place * step);
}

// Only if there were several: one version is said in the page's head.
function versions(counts) {
  if (counts.versions.length < 2) return null;
  const lines = counts.versions.map(([name, tokens, trajectories]) => ({ name, value: tokens, style: "bar", more: `in ${number(trajectories)} trajectories` }));
  if (counts.others) lines.push({ name: "others", value: counts.others, style: "quiet" });
  if (counts.unknown) lines.push({ name: "unknown", value: counts.unknown, style: "quiet" });
  const caption = `tokens by the version of the weights that sampled them; ${number(counts.several)} ${counts.several === 1 ? "trajectory has" : "trajectories have"} several versions`;
  return bars("Policy versions", caption, "tokens", lines);
}
