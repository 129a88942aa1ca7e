
// The tokens of a response, coloured by the probability with which they were sampled.
const likelihoods = [[0.5, ""], [0.1, "t1"], [0.01, "t2"], [0, "t3"]];
const leastShown = 20;

// Kept while the reader goes from one trajectory to the next.
let tokensShown = false;

class Tokens {
  static of(item) {
    return item.logprobs ? new Tokens(item) : null;
  }

  constructor(item) {
    this.item = item;
    this.logprobs = item.logprobs.map((value) => -value / 1000);
    let place = 0;
    this.texts = (item.lengths || []).map((length) => item.text.slice(place, (place += length)));
  }

  get mean() {
    return this.logprobs.length ? this.logprobs.reduce((sum, value) => sum + value, 0) / this.logprobs.length : null;
  }

  version(number) {
    const span = (this.item.versions || []).find(([, start, end]) => number >= start && number < end);
    return span ? span[0] : null;
  }

  name(number) {
    return this.item.ids ? `id ${this.item.ids[number]}` : this.texts[number] ? JSON.stringify(this.texts[number]) : "no text: special, or part of a character";
  }

  about(number) {
    const version = this.version(number);
    return [`token ${count(number + 1)} of ${count(this.logprobs.length)}: ${this.name(number)}`,
      `logprob ${logprob(this.logprobs[number])}, probability ${probability(this.logprobs[number])}`,
      version === null ? null : `policy version ${version}`].filter(Boolean).join("\n");
  }

  spans() {
    return this.logprobs.map((value, number) => {
      const style = likelihoods.find(([least]) => Math.exp(value) >= least)[1];
      const text = this.item.ids ? String(this.item.ids[number]) : this.texts[number] || "∅";
      const span = make("span", { class: `t ${style}${this.item.ids ? " id" : this.texts[number] ? "" : " none"}`, "data-token": number }, text);
      return this.item.ids ? [span, " "] : span;
    });
  }

  // The numbers for those who cannot point: the tokens that surprise most.
  table() {
    const order = this.logprobs.map((_, number) => number).sort((one, two) => this.logprobs[one] - this.logprobs[two] || one - two);
    const rows = order.slice(0, leastShown).map((number) => [count(number + 1), this.name(number), logprob(this.logprobs[number]), probability(this.logprobs[number]), this.version(number) ?? "–"]);
    return make("details", { class: "least" }, make("summary", {}, "Least probable tokens"),
      table([{ name: "token", n: true }, { name: "text" }, { name: "logprob", n: true }, { name: "probability", n: true }, { name: "policy version" }], rows, "Least probable tokens"));
  }
}

function logprob(value) {
  return value > -0.0005 ? "0" : value > -0.1 ? value.toFixed(3) : value.toFixed(2);
}

function probability(value) {
  const share = 100 * Math.exp(value);
  return `${share >= 99.95 ? "100" : share >= 0.1 ? Number(share.toPrecision(3)) : share.toExponential(0)} %`;
}

function tokenLegend() {
  return make("p", { class: "legend tokens-legend" }, make("span", {}, "sampled with a probability of"),
    [["t1", "10 to 50 %"], ["t2", "1 to 10 %"], ["t3", "below 1 %"]].map(([style, text]) => make("span", {}, make("b", { class: `t ${style}` }, "abc"), ` ${text}`)));
}

// A response whose text can change between plain and coloured; `words` are marked in the plain text.
function response(item, facts, words) {
  const tokens = Tokens.of(item), pre = make("pre", { dir: "auto" });
  const section = make("section", { class: "message assistant" }, make("header", {}, make("b", {}, item.role), facts), pre);
  const least = tokens && tokens.logprobs.length ? tokens.table() : null;
  const draw = () => {
    const coloured = tokens && tokensShown;
    pre.replaceChildren(...(coloured ? tokens.spans().flat() : marked(item.text, words)));
    if (coloured && item.ids) pre.prepend(make("span", { class: "muted" }, "Token ids; their texts need the tokenizer: kuberoll report --tokenizer\n"));
    if (least && coloured) section.append(least);
    else if (least) least.remove();
  };
  pre.addEventListener("pointermove", (event) => {
    const token = event.target.closest("[data-token]");
    if (token) showTip(event, tokens.about(Number(token.dataset.token)));
    else hideTip();
  });
  pre.addEventListener("pointerleave", hideTip);
  draw();
  return { section, draw, tokens };
}

// `3`, or `3 → 4` where the weights changed while the response was generated.
function versionsOf(spans) {
  return spans && spans.length ? `policy ${[...new Set(spans.map(([version]) => version))].join(" → ")}` : null;
}

function versionTokens(messages) {
  const tokens = new Map();
  for (const item of messages) {
    for (const [version, start, end] of item.versions || []) tokens.set(version, (tokens.get(version) || 0) + end - start);
  }
  return [...tokens].map(([version, value]) => (tokens.size === 1 ? version : `${version} (${count(value)} tokens)`)).join(", ");
}
