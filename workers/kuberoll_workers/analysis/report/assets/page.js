
// The reader's choice, kept where the browser lets a local file keep something.
function colours() {
  const names = ["auto", "light", "dark"], system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = "auto";
  try { chosen = localStorage.getItem("kuberoll-theme") || "auto"; } catch { /* not allowed: as the system */ }
  const apply = () => {
    document.documentElement.classList.toggle("dark", chosen === "dark" || (chosen === "auto" && system.matches));
    $("theme").lastElementChild.textContent = chosen[0].toUpperCase() + chosen.slice(1);
    $("theme").setAttribute("aria-label", `Colours: ${chosen === "auto" ? "as the system" : chosen}`);
  };
  $("theme").addEventListener("click", () => {
    chosen = names[(names.indexOf(chosen) + 1) % names.length];
    try { localStorage.setItem("kuberoll-theme", chosen); } catch { /* for this visit only */ }
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

const report = JSON.parse($("data").textContent);

// The list of the trajectories; null until they are unpacked.
let browser = null;

// Draws the page for the chosen environment, "" for all of them: now, at each choice, and for each width of the window.
async function present(environments, draw) {
  colours();
  const { browsed } = report, scope = $("scope");
  scope.append(...[["", "All environments"], ...environments.map((name) => [name, name])].map(([value, text]) => make("option", { value }, text)));
  $("scope-label").hidden = environments.length < 2;
  const redraw = () => {
    draw(scope.value, choose);
    if (browser && browser.environment !== scope.value) browser.scope(scope.value);
  };
  const choose = (name) => {
    scope.value = name;
    redraw();
  };
  scope.addEventListener("input", redraw);
  redraw();
  let width = innerWidth, resized;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(resized);
    resized = setTimeout(redraw, 100);
  });
  browser = new Browser(new Trajectories(await unpack($("index")), browsed.starts, browsed.count));
  if (scope.value) browser.scope(scope.value);
  document.documentElement.dataset.ready = "true";
}
