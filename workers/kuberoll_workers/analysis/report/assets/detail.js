
const count = (value) => whole.format(value);
const knownRoles = ["system", "user", "assistant", "environment", "tool"];
const mostMarks = 200;

// A text with the words that were searched for marked.
function marked(text, words) {
  const parts = [], lower = text.toLowerCase();
  // Where lower case has another length, places would not be the same.
  if (!words || lower.length !== text.length) return [text];
  let from = 0, place;
  while (parts.length < 2 * mostMarks && (place = lower.indexOf(words, from)) >= 0) {
    parts.push(text.slice(from, place), make("mark", {}, text.slice(place, place + words.length)));
    from = place + words.length;
  }
  return [...parts, text.slice(from)];
}

function message(role, facts, text, words) {
  const style = knownRoles.includes(role) || role === "failure" ? role : "";
  return make("section", { class: `message ${style}` },
    make("header", {}, make("b", {}, role), facts), make("pre", { dir: "auto" }, marked(text, words)));
}

// Turn by turn; everything is set as text.
function detail(trajectories, number, text, words, back) {
  const { index } = trajectories, outcome = index.outcomes[index.outcome[number]];
  const about = [
    ["reward", index.reward[number] === null ? "none" : fixed(index.reward[number])],
    ["stop reason", make("span", { class: outcome }, outcomeNames[outcome]
      + (text.dropped ? ` (dropped; ${text.stop_reason ? outcomeNames[text.stop_reason] : "stopped on its way"})` : ""))],
    ["turns", count(index.turns[number])],
    ["tokens", `${count(index.prompt[number])} prompt, ${count(index.generated[number])} generated, ${count(index.observed[number])} environment`],
  ];
  if (index.seconds[number] !== null) {
    const sum = (values) => values.reduce((total, value) => total + value, 0);
    about.push(["time", `${seconds(sum(text.generation))} generation, ${seconds(sum(text.environment))} environment`]);
  }
  for (const [name, values] of Object.entries(text.parts || {})) about.push([`reward of ${name}`, fixed(values.reduce((total, value) => total + value, 0))]);
  if (text.answer !== null && text.answer !== undefined) about.push(["answer", text.answer]);
  if (text.failure && text.failure.row) about.push(["dataset row", text.failure.row]);
  about.push(["seed", text.seed === null ? "none" : text.seed], ["attempt", String(text.attempt)]);
  const parts = [
    make("div", { class: "bar" }, make("h3", {}, `${trajectories.name(number)}  ${index.environments[index.environment[number]]}`),
      make("button", { type: "button", id: "back", onclick: back }, "Back to list")),
    make("dl", { class: "about" }, about.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
  ];
  let turn = null;
  const half = text.messages.length / 2;
  text.messages.forEach((item, place) => {
    if (text.left_out && place === half) parts.push(make("p", { class: "empty" }, `${count(text.left_out)} messages left out here`));
    if (item.turn !== turn) {
      turn = item.turn;
      parts.push(turnLine(turn, text));
    }
    const facts = [make("span", {}, `${count(item.tokens)} tokens`), item.truncated ? make("span", { class: "flag" }, "truncated") : null];
    parts.push(message(item.role, facts, item.text, words));
  });
  if (text.failure) {
    const { kind, stage, cause, tries, traceback } = text.failure;
    parts.push(make("div", { class: "turn" }, make("b", {}, "Failure")),
      message("failure", [make("span", {}, `${kind}, ${stage}, after ${count(tries)} tries`)], cause, words));
    if (traceback) parts.push(message("failure", [make("span", {}, "traceback")], traceback, words));
  }
  for (const [name, value] of [["Metadata at the end", text.metadata], ["idx", text.idx]]) {
    if (value) parts.push(make("details", {}, make("summary", {}, name), make("pre", {}, marked(value, words))));
  }
  return parts;
}

function turnLine(turn, text) {
  if (turn === 0) return make("div", { class: "turn" }, make("b", {}, "Prompt"));
  const at = (values) => (values && turn <= values.length ? values[turn - 1] : null);
  const told = [["reward", at(text.rewards), fixed], ["generation", at(text.generation), seconds], ["environment", at(text.environment), seconds]];
  return make("div", { class: "turn" }, make("b", {}, `Turn ${turn}`),
    told.filter(([, value]) => value !== null).map(([name, value, format]) => make("span", {}, `${name} ${format(value)}`)));
}
