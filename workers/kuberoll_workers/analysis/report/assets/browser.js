
// The list of trajectories: filters, a search that never blocks, and only as many rows in the page as can be seen.
class Browser {
  static height = 36;
  static spare = 8;
  static usual = "stored";

  static orders = {
    stored: ["as stored", null],
    worst: ["lowest reward", (index) => (number) => index.reward[number] ?? Infinity],
    best: ["highest reward", (index) => (number) => -(index.reward[number] ?? -Infinity)],
    turns: ["most turns", (index) => (number) => -index.turns[number]],
    tokens: ["most tokens", (index, all) => (number) => -all.tokens(number)],
    seconds: ["most time", (index) => (number) => -(index.seconds[number] ?? -1)],
    task: ["task", (index) => (number) => index.task[number] * 4294967296 + index.rollout[number]],
  };

  constructor(trajectories) {
    this.all = trajectories;
    this.environment = "";
    this.shown = [];
    this.chosen = null;
    this.asked = 0;
    this.rows = new Map();
    const { outcomes, outcome } = trajectories.index;
    const there = new Set(outcome);
    $("outcome").append(make("option", { value: "" }, "any"),
      ...outcomes.map((name, place) => (there.has(place) ? make("option", { value: place }, report.endings[name].title) : "")));
    $("order").append(...Object.entries(Browser.orders).map(([value, [name]]) => make("option", { value }, name)));
    $("order").value = Browser.usual;
    for (const id of ["outcome", "order", "least", "most"]) $(id).addEventListener("input", () => this.filter());
    $("search").addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.filter(), 120);
    });
    $("clear").addEventListener("click", () => this.clear());
    $("list").addEventListener("scroll", () => this.draw(), { passive: true });
    $("list").addEventListener("click", (event) => {
      const row = event.target.closest("[role=option]");
      if (row) this.choose(Number(row.dataset.place), true);
    });
    new ResizeObserver(() => this.draw()).observe($("list"));
    addEventListener("keydown", (event) => this.key(event));
    addEventListener("hashchange", () => this.follow());
    this.filter();
    this.follow();
  }

  get words() {
    const text = $("search").value.trim();
    return this.all.named(text) ? "" : text.toLowerCase();
  }

  clear() {
    for (const id of ["search", "outcome", "least", "most"]) $(id).value = "";
    $("order").value = Browser.usual;
    this.filter();
  }

  scope(environment) {
    this.environment = environment;
    this.filter();
  }

  // Rows at once; what needs the texts comes when they have been read, unless another filter was asked for by then.
  async filter() {
    const { index } = this.all, asked = ++this.asked;
    const text = $("search").value.trim(), named = this.all.named(text);
    const outcome = $("outcome").value === "" ? null : Number($("outcome").value);
    const environment = this.environment === "" ? null : index.environments.indexOf(this.environment);
    const least = $("least").valueAsNumber, most = $("most").valueAsNumber;
    const found = [];
    for (let number = 0; number < this.all.count; number++) {
      if (environment !== null && index.environment[number] !== environment) continue;
      if (outcome !== null && index.outcome[number] !== outcome) continue;
      const reward = index.reward[number];
      if (!Number.isNaN(least) && !(reward !== null && reward >= least)) continue;
      if (!Number.isNaN(most) && !(reward !== null && reward <= most)) continue;
      if (named && !named(number)) continue;
      found.push(number);
    }
    if (!text || named) {
      this.show(found);
      return;
    }
    $("list").setAttribute("aria-busy", "true");
    const tell = (part, count) => { $("count").textContent = `Searching: ${Math.round(100 * part)} %, ${number(count)} found`; };
    const matching = await this.all.search(text, found, tell, () => asked === this.asked);
    if (matching) this.show(matching);
  }

  show(numbers) {
    const key = Browser.orders[$("order").value][1];
    if (key) {
      const by = key(this.all.index, this.all), keys = new Map(numbers.map((item) => [item, by(item)]));
      numbers.sort((one, two) => keys.get(one) - keys.get(two) || one - two);
    }
    this.shown = numbers;
    this.clearRows();
    $("list").removeAttribute("aria-busy");
    $("list").scrollTop = 0;
    $("rows").style.height = `${numbers.length * Browser.height}px`;
    $("count").textContent = numbers.length === this.all.count ? `${number(numbers.length)} trajectories`
      : numbers.length ? `${number(numbers.length)} of ${number(this.all.count)} trajectories`
      : "No trajectory matches. Clear the filters to see all.";
    this.draw();
  }

  clearRows() {
    this.rows.clear();
    $("rows").replaceChildren();
  }

  draw() {
    const list = $("list");
    const first = Math.max(0, Math.floor(list.scrollTop / Browser.height) - Browser.spare);
    const last = Math.min(this.shown.length, Math.ceil((list.scrollTop + list.clientHeight) / Browser.height) + Browser.spare);
    for (const [place, row] of this.rows) {
      if (place < first || place >= last) {
        row.remove();
        this.rows.delete(place);
      }
    }
    for (let place = first; place < last; place++) {
      if (!this.rows.has(place)) this.rows.set(place, this.row(place));
    }
    for (const [place, row] of this.rows) {
      row.setAttribute("aria-selected", String(this.shown[place] === this.chosen));
    }
    const at = this.shown.indexOf(this.chosen);
    if (this.rows.has(at)) list.setAttribute("aria-activedescendant", `row-${at}`);
    else list.removeAttribute("aria-activedescendant");
  }

  row(place) {
    const item = this.shown[place], { index } = this.all, outcome = index.outcomes[index.outcome[item]];
    const row = make("div", { class: "row", role: "option", id: `row-${place}`, "data-place": place, "aria-setsize": this.shown.length, "aria-posinset": place + 1 },
      make("span", {}, this.all.name(item)), make("span", {}, index.environments[index.environment[item]]),
      make("span", { class: "n" }, fixed(index.reward[item])), make("span", { class: "n" }, number(index.turns[item])),
      make("span", { class: "n" }, number(this.all.tokens(item))), ending(outcome));
    row.style.transform = `translateY(${place * Browser.height}px)`;
    $("rows").append(row);
    return row;
  }

  // `read`: on a narrow screen, which has room for one of them, the trajectory takes the list's place.
  async choose(place, read) {
    if (!(place >= 0 && place < this.shown.length)) return;
    const item = this.shown[place];
    this.chosen = item;
    this.reveal(place);
    this.draw();
    if (read) document.querySelector(".browser").classList.add("reading");
    history.replaceState(null, "", this.all.name(item));
    const text = await this.all.text(item);
    if (this.chosen !== item) return;
    document.querySelector(".browser").classList.add("chosen");
    $("detail").replaceChildren(...detail(this.all, item, text, this.words, () => this.back()));
    $("detail").scrollTop = 0;
    const mark = $("detail").querySelector("mark");
    if (mark) $("detail").scrollTop = Math.max(0, mark.getBoundingClientRect().top - $("detail").getBoundingClientRect().top - 120);
    if (read && getComputedStyle($("back")).display !== "none") {
      $("detail").scrollIntoView();
      $("detail").focus({ preventScroll: true });
    }
  }

  reveal(place) {
    const list = $("list"), top = place * Browser.height;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + Browser.height > list.scrollTop + list.clientHeight) list.scrollTop = top + Browser.height - list.clientHeight;
  }

  back() {
    document.querySelector(".browser").classList.remove("reading");
    $("list").focus();
    this.draw();
  }

  // An address that ends in #task.rollout is of that trajectory.
  follow() {
    const named = this.all.named(decodeURIComponent(location.hash));
    const place = named ? this.shown.findIndex(named) : -1;
    if (place < 0 || this.shown[place] === this.chosen) return;
    this.choose(place, true);
    $("trajectories").scrollIntoView();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "Escape") {
      if (typing) {
        if (event.target === $("search") && event.target.value) {
          event.target.value = "";
          this.filter();
        }
        event.target.blur();
      }
      this.back();
      return;
    }
    if (event.target === $("search") && (event.key === "ArrowDown" || event.key === "Enter")) {
      $("list").focus();
      this.choose(0, event.key === "Enter");
      event.preventDefault();
      return;
    }
    if (typing) return;
    if (event.key === "/") {
      $("search").focus();
      $("search").select();
      event.preventDefault();
      return;
    }
    const inList = event.target === $("list"), at = this.shown.indexOf(this.chosen);
    const page = Math.max(1, Math.floor($("list").clientHeight / Browser.height) - 1);
    const moves = { j: at + 1, k: at < 0 ? 0 : at - 1 };
    if (inList) {
      Object.assign(moves, {
        ArrowDown: at + 1, ArrowUp: at < 0 ? 0 : at - 1, Home: 0, End: this.shown.length - 1,
        PageDown: Math.min(this.shown.length - 1, at + page), PageUp: Math.max(0, at - page), Enter: Math.max(0, at),
      });
    }
    if (!(event.key in moves)) return;
    event.preventDefault();
    if (!inList && document.activeElement !== $("detail")) $("list").focus();
    this.choose(moves[event.key], event.key === "Enter");
    if (event.key === "Enter") $("detail").focus({ preventScroll: true });
  }
}
