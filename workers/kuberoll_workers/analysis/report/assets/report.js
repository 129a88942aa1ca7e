
function key(numbers, head) {
  const failed = ended(numbers, "failed"), dropped = ended(numbers, "dropped"), planned = numbers.name === "" || report.numbers.environments.length === 1 ? head.planned : null;
  const { reward, turns, generated, groups } = numbers, busy = numbers.generation_seconds.total + numbers.environment_seconds.total;
  const items = [
    ["Finished trajectories", number(numbers.finished), planned ? `of ${number(planned)} planned` : dropped ? `${number(dropped)} more dropped` : ""],
    ["Mean reward", fixed(reward.mean), reward.std === null ? "" : `std ${fixed(reward.std)}`],
    ["Groups without signal", percent(groups.equal, groups.groups), `${number(groups.equal)} of ${number(groups.groups)}`],
    ["Turns", number(turns.mean), turns.count ? `on average; up to ${number(turns.max)}` : ""],
    ["Generated tokens", big(generated.total), generated.count ? `${number(generated.mean)} a trajectory` : ""],
    ["Time in generation", percent(numbers.generation_seconds.total, busy), generated.count ? `of ${seconds(busy / numbers.finished)} a trajectory` : ""],
    ["Failed", number(failed), percent(failed, failed + numbers.finished), failed],
  ];
  return items.map(keyItem);
}

function keyItem([name, value, more, bad]) {
  return make("div", {}, make("dt", {}, name), make("dd", { class: bad ? "bad" : null }, value, make("small", {}, more)));
}

// The machines that finished trajectories had.
function sandboxKey(found) {
  if (!found) return [];
  const { starts, most, lost, left } = found;
  return [
    ["Sandboxes", number(starts.count), "of finished trajectories"],
    ["Start of a sandbox", seconds(starts.median), `median; 95 % within ${seconds(starts.p95)}`],
    ["Sandboxes at a time", number(most), "at most"],
    ["Sandboxes lost", number(lost), "trajectories started over", lost],
    ["Sandboxes left", number(left), "could not be removed", left],
  ].map(keyItem);
}

function environmentTable(environments, chosen, choose) {
  const heads = ["environment", "finished", "failed", "reward", "std", "no signal", "turns", "tokens generated", "time"].map((name, place) => ({ name, n: place > 0 }));
  const rows = environments.map((item) => [
    make("button", { type: "button", "aria-pressed": String(item.name === chosen), onclick: () => choose(item.name === chosen ? "" : item.name) }, item.name),
    number(item.finished), number(ended(item, "failed")), fixed(item.reward.mean), fixed(item.reward.std),
    percent(item.groups.equal, item.groups.groups), number(item.turns.mean), number(item.generated.mean),
    item.finished ? seconds((item.generation_seconds.total + item.environment_seconds.total) / item.finished) : "–",
  ]);
  const found = make("div", { class: "card" }, table(heads, rows, "Environments; means over finished trajectories"));
  [...found.querySelectorAll("tbody tr")].forEach((row, place) => row.classList.toggle("here", environments[place].name === chosen));
  return found;
}

function charts(numbers, environments) {
  const styles = { finished: "bar", failed: "bad", dropped: "quiet" };
  const ways = Object.entries(report.endings).filter(([name]) => numbers.outcomes[name])
    .map(([name, { title, kind }]) => ({ name: title, value: numbers.outcomes[name], style: styles[kind] }));
  return [
    throughput(numbers.throughput, numbers.name === "" || environments.length === 1 ? report.numbers.all.distance : null),
    histogram("Reward", numbers.reward, { unit: "total reward", span: 3 }),
    signal(numbers.groups),
    histogram("Turns", numbers.turns, { unit: "turns" }),
    histogram("Generated tokens", numbers.generated, { unit: "tokens of a trajectory" }),
    histogram("Time of a trajectory in generation", numbers.generation_seconds, { unit: "seconds", format: seconds }),
    numbers.sandboxes && histogram("Start of a sandbox", numbers.sandboxes.starts, { unit: "seconds", of: "sandboxes", format: seconds }),
    // Side by side, because they are lower than the charts above.
    bars("How trajectories ended", "stop reasons, failures and dropped ones", "trajectories", ways),
    times(numbers.name === "" && environments.length > 1 ? environments : [numbers]),
    versions(numbers.versions),
    removal(numbers.removal),
    failures(numbers),
  ];
}

const VERDICTS = {
  longer: () => "long ones were removed more often: what is kept is biased",
  exposed: ({ mean, low, high }) => `on their way: if that struck whoever was running, the kept rewards of a prompt are off by ${fixed(mean)} (${fixed(low)} to ${fixed(high)})`,
  none: () => "no sign that it depends on length",
  unclear: () => "whether it depends on length cannot be told from what is stored",
};

// What failures, limits and staleness removed, by the turn that it had reached.
function removal(found) {
  if (!found) return null;
  const { removed, share, verdict, turns, shift } = found;
  const caption = `${number(removed)} trajectories, ${percent(share, 1)}; ${VERDICTS[verdict](shift)}`;
  const lines = turns.filter((line) => line.removed).map(({ from, to, reached, removed: count }) => ({
    name: to ? `turn ${from === to ? from : `${from}–${to}`}` : "before turn 1",
    value: count, style: "bad", more: `${percent(count, reached)} of ${number(reached)} that got so far`,
  }));
  return bars("What was removed, by turn", caption, "trajectories", lines);
}

async function start() {
  const { head, numbers, browsed } = report, { environments } = numbers;
  const [version, another] = numbers.all.versions.versions;
  const facts = [head.job ? head.location : null, head.created ? `begun ${head.created.replace("T", " ")}` : null,
    version && !another ? `policy version ${version[0]}` : null,
    head.settings.some(([name, value]) => name === "generation.engine" && value === "Simulated") ? "engine Simulated: no model wrote the responses" : null];
  $("facts").textContent = facts.filter(Boolean).join(" · ");
  $("sample").textContent = browsed.count === browsed.offered ? ""
    : `${number(browsed.count)} of ${number(browsed.offered)} can be read here: failures first, and an even sample of the others. The numbers above are over all.`;
  $("settings").append(table([{ name: "setting" }, { name: "value" }], head.settings, "Settings"));
  $("settings-section").hidden = !head.settings.length;
  $("detail").append(make("p", { class: "empty" }, browsed.count ? "Choose a trajectory to read it turn by turn." : "The run has no trajectory yet."));
  await present(environments.map((item) => item.name), (chosen, choose) => {
    const shown = environments.length === 1 ? environments[0] : environments.find((item) => item.name === chosen && chosen) || numbers.all;
    $("key").replaceChildren(...key(shown, head));
    $("sandboxes").replaceChildren(...sandboxKey(shown.sandboxes));
    $("sandboxes").hidden = !shown.sandboxes;
    const cards = charts(shown, environments).filter(Boolean);
    $("numbers").hidden = !cards.length;
    $("charts").replaceChildren(...arranged(cards));
    $("environments").replaceChildren(...(environments.length > 1 ? [environmentTable(environments, chosen, choose)] : []));
  });
}

start();
