
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
