
const formats = {
  number: { value: number, change: (value) => signed(value, number), unit: "" },
  seconds: { value: seconds, change: (value) => signed(value, seconds), unit: "" },
  share: { value: (value) => (value === null ? "–" : `${Number((100 * value).toPrecision(3))} %`), change: (value) => signed(100 * value, (points) => `${Number(points.toPrecision(3))}`), unit: " points" },
};

function signed(value, format) {
  return `${value > 0 ? "+" : value < 0 ? "−" : ""}${format(Math.abs(value))}`;
}

// In words what the interval says; which of the two is better depends on the metric.
function reading(metric) {
  if (metric.difference === null) return "only one run has it";
  if (metric.low === null) return "too few tasks";
  if (metric.paired && metric.low === 0 && metric.high === 0) return "no task differs";
  return metric.low > 0 ? "B is higher" : metric.high < 0 ? "B is lower" : "no clear difference";
}

// The interval beside 0, as wide as its farther end.
function intervalPicture(metric) {
  const width = 120, height = 18, middle = width / 2;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "interval", "aria-hidden": "true" });
  svg.append(make("line", { class: "axis", x1: middle, x2: middle, y1: 0, y2: height }));
  if (metric.low === null) return svg;
  const most = Math.max(Math.abs(metric.low), Math.abs(metric.high)) || 1, x = (value) => middle + (value / most) * (middle - 6);
  const clear = metric.low > 0 || metric.high < 0;
  svg.append(make("line", { class: clear ? "reach clear" : "reach", x1: x(metric.low), x2: x(metric.high), y1: height / 2, y2: height / 2 }),
    make("circle", { class: clear ? "clear" : "", cx: x(metric.difference), cy: height / 2, r: 4 }));
  return svg;
}

function metricTable(metrics, paired) {
  const heads = [{ name: "mean over tasks" }, { name: "A", n: true }, { name: "B", n: true }, { name: "B − A", n: true }, { name: "95 % interval", n: true }, { name: "" }, { name: "reading" }, { name: paired ? "pairs of tasks" : "tasks", n: true }];
  const rows = metrics.map((metric) => {
    const { value, change, unit } = formats[metric.kind];
    return [metric.name, value(metric.first), value(metric.second), metric.difference === null ? "–" : change(metric.difference) + unit,
      metric.low === null ? "–" : `${change(metric.low)} to ${change(metric.high)}${unit}`, intervalPicture(metric), reading(metric), number(metric.size)];
  });
  return table(heads, rows, "Metrics of both runs");
}

function overview(shown) {
  const [reward] = shown.metrics, { value, change, unit } = formats[reward.kind], { changes } = shown;
  const speeds = report.runs.map((run) => run.tokens_per_second);
  const items = [
    [`Mean ${reward.name}`, `${value(reward.first)} → ${value(reward.second)}`, reward.difference === null ? "" : `${change(reward.difference)}${unit}: ${reading(reward)}`],
  ];
  if (changes) {
    items.push(["Better in B", number(changes.better), "tasks with more reward"], ["Worse in B", number(changes.worse), "tasks with less reward"],
      ["Equal", number(changes.equal), "tasks with the same reward"]);
  }
  if (speeds.every((speed) => speed !== null)) items.push(["Throughput", speeds.map(big).join(" → "), "tokens/s of the whole run"]);
  return items.map(([name, value, more]) => make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, more))));
}

function scatter(changes) {
  return changes.points.length ? { span: 6, draw: (span) => scatterCard(changes, span) } : null;
}

function scatterCard(changes, span) {
  const title = "Mean reward of each task", all = changes.better + changes.worse + changes.equal;
  const caption = `${number(all)} tasks: ${number(changes.better)} better in B, ${number(changes.worse)} worse, ${number(changes.equal)} equal (on the line)`;
  const width = room(span), height = 320, bottom = height - MARGIN.bottom;
  const values = changes.points.flatMap(([one, two]) => [one, two]);
  let low = Math.min(...values), high = Math.max(...values);
  const pad = (high - low || 1) * 0.05;
  [low, high] = [low - pad, high + pad];
  const most = Math.max(...changes.points.map((point) => point[2]));
  const x = scale(low, high, MARGIN.left, width - MARGIN.right, ticks(low, high, width / 90));
  const y = scale(low, high, bottom, MARGIN.top + 8, ticks(low, high, 5));
  const svg = frame(width, height, `${title}: ${caption}`, { x, y, xLabel: "A", yLabel: "B", yFormat: number });
  svg.append(make("line", { class: "mean", x1: x(low), x2: x(high), y1: y(low), y2: y(high) }));
  for (const [one, two, count] of [...changes.points].sort((first, second) => second[2] - first[2])) {
    const text = `${number(count)} ${count === 1 ? "task" : "tasks"}\nA ${number(one)}, B ${number(two)}`;
    svg.append(make("circle", { class: `point ${two > one ? "" : two < one ? "worse" : "same"}`, cx: x(one), cy: y(two), r: Math.max(3, Math.sqrt(count / most) * Math.min(16, 5 + Math.sqrt(most))), ...tip(text) }));
  }
  const legend = make("p", { class: "legend" }, make("span", {}, make("i"), "better in B"), make("span", {}, make("i", { class: "bad" }), "worse in B"), make("span", {}, make("i", { class: "quiet" }), "equal"), make("span", {}, "area: number of tasks"));
  const rows = changes.points.map(([one, two, count]) => [number(one), number(two), number(count)]);
  return card(title, caption, [svg, legend, asTable([{ name: "A", n: true }, { name: "B", n: true }, { name: "tasks", n: true }], rows, title)], span);
}

// Tasks with their trajectories, each a link to read it.
function taskTable(title, total, tasks, open, several) {
  if (!tasks.length) return null;
  const link = (letter, task) => ([rollout, reward]) => make("a", { href: `#${letter}${task}.${rollout}`, class: "chip", "aria-label": `reward ${number(reward)} of #${letter}${task}.${rollout}`, onclick: open }, number(reward));
  const heads = [{ name: "task" }, ...(several ? [{ name: "environment" }] : []), { name: "A", n: true }, { name: "B", n: true }, { name: "B − A", n: true }, { name: "rewards of its trajectories" }];
  const rows = tasks.map((item) => [String(item.task), ...(several ? [item.environment] : []), fixed(item.first), fixed(item.second), signed(item.second - item.first, fixed),
    ["A", "B"].map((letter, place) => make("div", { class: "chips" }, make("b", {}, letter), make("span", {}, item.rollouts[place].map(link(letter, item.task)))))]);
  const caption = tasks.length < total ? `the ${number(tasks.length)} of ${number(total)} with the greatest differences` : `${number(total)} ${total === 1 ? "task" : "tasks"}`;
  return { span: 3, draw: (span) => card(title, caption, make("div", { class: "tasks stacked" }, table(heads, rows, title)), span) };
}

async function start() {
  const { runs, notes, paired, settings, environments, browsed } = report;
  $("facts").append(...["A", "B"].map((letter, place) => make("span", { class: "run" }, make("b", {}, letter),
    ` ${runs[place].location}: ${[runs[place].job, `${number(runs[place].finished)} finished`, runs[place].failed ? `${number(runs[place].failed)} failed` : null, runs[place].created ? `begun ${runs[place].created.replace("T", " ")}` : null].filter(Boolean).join(", ")}`)));
  $("notes").hidden = !notes.length;
  $("notes").append(...notes.map((note) => make("li", {}, note)));
  const differ = settings.different.map(([name, one, two]) => [name, one ?? "–", two ?? "–"]);
  $("settings").append(...(differ.length ? [table([{ name: "setting" }, { name: "A" }, { name: "B" }], differ, "Settings that differ")] : []),
    make("p", { class: "muted" }, differ.length ? `${number(settings.equal)} other settings are equal.` : settings.equal ? `None of ${number(settings.equal)}.` : "Unknown."));
  $("sample").textContent = browsed.count === browsed.offered ? ""
    : `${number(browsed.count)} of ${number(browsed.offered)} can be read here${environments.some((item) => item.changes && item.changes.listed.length) ? ": those of the tasks listed above" : ""}.`;
  $("search").placeholder = "Search the text, or #task, or #A17.0";
  $("detail").append(make("p", { class: "empty" }, "Choose a trajectory to read it turn by turn."));
  // The samples of a task in both runs, one below the other.
  Browser.usual = "task";
  const open = (event) => {
    event.preventDefault();
    if (!browser) return;
    browser.clear();
    history.replaceState(null, "", event.currentTarget.getAttribute("href"));
    browser.follow();
    $("trajectories").scrollIntoView();
  };
  await present(environments.map((item) => item.name).filter(Boolean), (chosen) => {
    const shown = environments.find((item) => item.name === chosen) || environments[0], { changes } = shown;
    $("key").replaceChildren(...overview(shown));
    $("metrics").replaceChildren(metricTable(shown.metrics, paired));
    const better = changes ? changes.listed.filter((item) => item.second > item.first) : [], worse = changes ? changes.listed.filter((item) => item.second < item.first) : [];
    const several = !shown.name;
    const cards = changes ? [scatter(changes), taskTable("Better in B", changes.better, better, open, several), taskTable("Worse in B", changes.worse, worse, open, several)].filter(Boolean) : [];
    $("tasks").hidden = !cards.length;
    $("charts").replaceChildren(...arranged(cards));
  });
}

start();
