
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
    ["stop reason", ending(outcome,
      text.dropped ? ` (dropped; ${text.stop_reason ? report.endings[text.stop_reason].title : "stopped on its way"})` : "")],
    ["turns", count(index.turns[number])],
    ["tokens", `${count(index.prompt[number])} prompt, ${count(index.generated[number])} generated, ${count(index.observed[number])} environment`],
  ];
  if (index.seconds[number] !== null) {
    const sum = (values) => values.reduce((total, value) => total + value, 0);
    about.push(["time", `${seconds(sum(text.generation))} generation, ${seconds(sum(text.environment))} environment`]);
  }
  for (const [name, values] of Object.entries(text.parts || {})) about.push([`reward of ${name}`, fixed(values.reduce((total, value) => total + value, 0))]);
  if (text.answer !== null && text.answer !== undefined) about.push(["answer", text.answer]);
  if (text.branch_count) about.push(["branches", count(text.branch_count)]);
  if (text.continuity) about.push(["continuity", text.continuity]);
  if (text.failure && text.failure.row) about.push(["dataset row", text.failure.row]);
  const sampled = versionTokens(text.messages);
  if (sampled) about.push([sampled.includes(",") ? "policy versions" : "policy version", sampled]);
  about.push(["seed", text.seed === null ? "none" : text.seed], ["attempt", String(text.attempt)]);
  const responses = [], legend = tokenLegend();
  const coloured = make("input", { type: "checkbox", id: "tokens" });
  const toggle = text.messages.some((item) => item.logprobs && item.logprobs.length) ? make("label", { class: "switch" }, coloured, "Token probabilities") : null;
  const recolour = () => {
    legend.hidden = !tokensShown || !toggle;
    for (const each of responses) each.draw();
  };
  coloured.checked = tokensShown;
  coloured.addEventListener("input", () => {
    tokensShown = coloured.checked;
    recolour();
  });
  const parts = [
    make("div", { class: "bar" }, make("h3", {}, `${trajectories.name(number)}  ${index.environments[index.environment[number]]}`),
      toggle, make("button", { type: "button", id: "back", onclick: back }, "Back to list")),
    make("dl", { class: "about" }, about.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
  ];
  parts.push(legend);
  const show = (path, timed) => path.messages.forEach((item, place) => {
    if (path.left_out && place === path.messages.length / 2) parts.push(make("p", { class: "empty" }, `${count(path.left_out)} messages left out here`));
    if (timed && (place === 0 || item.turn !== path.messages[place - 1].turn)) parts.push(turnLine(item.turn, text));
    const flag = item.truncated ? make("span", { class: "flag" }, "truncated") : null, tokens = make("span", {}, `${count(item.tokens)} tokens`);
    if (!item.sampled) {
      parts.push(message(item.role, [tokens, flag], item.text, words));
      return;
    }
    const mean = Tokens.of(item)?.mean ?? null, sampledBy = versionsOf(item.versions);
    responses.push(response(item, [tokens, mean === null ? null : make("span", {}, `mean logprob ${logprob(mean)}`),
      sampledBy && sampled.includes(",") ? make("span", {}, sampledBy) : null, flag], words));
    parts.push(responses[responses.length - 1].section);
  });
  show(text, true);
  (text.branches || []).forEach((branch, place) => {
    parts.push(make("div", { class: "turn" }, make("b", {}, `Branch ${place + 1}`),
      branch.shared ? make("span", {}, `after ${count(branch.shared)} messages of an earlier path`) : null));
    show(branch, false);
  });
  const hidden = (text.branch_count || 0) - (text.branches || []).length;
  if (hidden > 0) parts.push(make("p", { class: "empty" }, `${count(hidden)} branches left out here`));
  if (text.failure) {
    const { kind, stage, cause, tries, traceback } = text.failure;
    parts.push(make("div", { class: "turn" }, make("b", {}, "Failure")),
      message("failure", [make("span", {}, `${kind}, ${stage}, after ${count(tries)} tries`)], cause, words));
    if (traceback) parts.push(message("failure", [make("span", {}, "traceback")], traceback, words));
  }
  if (text.story) {
    parts.push(make("div", { class: "turn" }, make("b", {}, "What happened")),
      message("environment", [make("span", {}, "whose doing it was")], text.story.join("\n"), words));
  }
  for (const [name, value] of [["Metadata at the end", text.metadata], ["idx", text.idx]]) {
    if (value) parts.push(make("details", {}, make("summary", {}, name), make("pre", {}, marked(value, words))));
  }
  recolour();
  return parts;
}

function turnLine(turn, text) {
  if (turn === 0) return make("div", { class: "turn" }, make("b", {}, "Prompt"));
  const at = (values) => (values && turn <= values.length ? values[turn - 1] : null);
  const told = [["reward", at(text.rewards), fixed], ["generation", at(text.generation), seconds], ["environment", at(text.environment), seconds]];
  return make("div", { class: "turn" }, make("b", {}, `Turn ${turn}`),
    told.filter(([, value]) => value !== null).map(([name, value, format]) => make("span", {}, `${name} ${format(value)}`)));
}
