// The table of heads and what they do, for the selected task and model, and the heads that interfere.
"use strict";

(() => {
  const { data, find, make, token, signed, percent, headButton, mark, onSelect, selected } = window.gatelens;
  if (!find("head-table")) return;

  const LISTED = 12; // interfering heads of a model
  const ADJECTIVES = { facilitation: "facilitating", irrelevance: "irrelevant", interference: "interfering" };

  function show(state, changed) {
    if (changed.has("task") || changed.has("model")) {
      const { table } = selected.model();
      find("head-table").replaceChildren(...(table ? [makeTable(table)] : []));
      find("head-note").textContent = table ? about(table) : "No table of heads was saved for this model: run gatelens circuit again with --describe 10.";
      find("interfering").replaceChildren(...interfering());
      document.querySelectorAll("#head-section button.head").forEach(mark);
    }
    const rows = [...find("head-table").querySelectorAll("tbody tr")];
    rows.forEach((row) => row.classList.toggle("selected", row.dataset.head === state.head));
    const isThere = !rows.length || rows.some((row) => row.dataset.head === state.head);
    const listed = rows.filter((row) => !row.classList.contains("dense")).length;
    find("head-status").textContent = isThere ? "" : `${state.head} is not among the ${listed} heads of this table.`;
  }

  const about = ({ prompts, metric, effect, dense }) => (
    `${prompts} prompts. Score: how much the ${metric} falls without the head, with its 95 % interval. Share: of the effect of all heads together (${signed(effect)}).`
    + (dense ? ` Below each head: the same head of ${dense.model}, the dense model.` : ""));

  // The columns: title, contents of a cell, class. Columns without contents are not drawn.
  function columns({ lines: own, dense }) {
    const lines = [...own, ...(dense?.lines ?? []).filter((line) => line)];
    const most = Math.max(...lines.map(({ low, high }) => Math.max(Math.abs(low), Math.abs(high)))) || 1;
    const roles = lines[0]?.roles ?? [];
    return [
      ["Score", (line) => score(line, most), "number"],
      ["Share", (line) => [percent(line.share)], "number"],
      ["Kind", ({ kinds }) => [kinds.join(", ")]],
      ["Looks at", ({ looks }) => looks.map(([role, share]) => chip(role, share))],
      ["Writes", ({ writes }) => writes.map((text) => make("code", {}, token(text)))],
      ["Right, wrong answer", ({ answer, wrong }) => [`${signed(answer)}, ${signed(wrong)}`], "number"],
      ["Open keys", ({ open }) => (open === null ? [] : [String(Number(open.toPrecision(3)))]), "number"],
      ...roles.map(({ task }, i) => [`Role in ${task}`, (line) => role(line.roles[i])]),
    ].filter(([, contents]) => lines.some((line) => contents(line).some((part) => part !== "")));
  }

  function makeTable(table) {
    const shown = columns(table);
    const titles = ["Head", ...shown.map(([title]) => title)].map((title, i) => (
      make("th", { scope: "col", className: shown[i - 1]?.[2] ?? "" }, title)));
    const cells = (line) => shown.map(([title, contents, kind = ""]) => {
      const parts = contents(line);
      const cell = make("td", { className: parts.some((part) => part !== "") ? kind : `${kind} empty` }, ...parts);
      cell.dataset.label = title;
      return cell;
    });
    const row = (head, title, className, ...contents) => {
      const made = make("tr", { className }, title, ...contents);
      made.dataset.head = head;
      made.addEventListener("click", () => window.gatelens.select({ head }));
      return made;
    };
    const missing = () => make("td", { colSpan: shown.length, className: "soft missing" }, "The run of the dense model does not describe this head.");
    const rows = table.lines.flatMap((line, i) => {
      const own = row(line.head, make("th", { scope: "row" }, headButton(line.head)), "", ...cells(line));
      if (!table.dense) return [own];
      const same = table.dense.lines[i];
      const title = make("th", { scope: "row", title: `${line.head} of ${table.dense.model}` }, "dense");
      return [own, row(line.head, title, "dense", ...(same ? cells(same) : [missing()]))];
    });
    return make("table", { className: "cards heads" }, make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...rows));
  }

  // The score, its interval, and both as a bar around zero
  function score({ score: value, low, high }, most) {
    const place = (x) => 50 + (50 * x) / most;
    const bar = make("span", { className: `whisker ${value < 0 ? "negative" : ""}` }, make("i", {}), make("b", {}));
    bar.style.setProperty("--from", `${Math.min(50, place(value))}%`);
    bar.style.setProperty("--to", `${100 - Math.max(50, place(value))}%`);
    bar.style.setProperty("--low", `${place(low)}%`);
    bar.style.setProperty("--high", `${100 - place(high)}%`);
    return [make("strong", {}, signed(value)), " ", make("span", { className: "soft" }, `(${signed(low)} to ${signed(high)})`), bar];
  }

  function chip(text, share) {
    const made = make("span", { className: "chip" }, `${text} ${percent(share)}`);
    made.style.setProperty("--weight", (0.45 * share).toFixed(3));
    return made;
  }

  // The kind with the largest score
  function role({ scores } = { scores: {} }) {
    const [best] = Object.entries(scores).sort((a, b) => b[1] - a[1]);
    if (!best) return [];
    const all = Object.entries(scores).map(([kind, value]) => `${kind} ${value.toFixed(2)}`).join(", ");
    return [make("span", { className: `role ${best[0]}`, title: all }, `${ADJECTIVES[best[0]]} ${best[1].toFixed(2)}`)];
  }

  function interfering() {
    const lines = selected.task().models.flatMap((model) => model.interfering.map(({ task, seeds, heads }) => {
      const more = heads.length > LISTED ? `the first ${LISTED} of ${heads.length}` : `${heads.length} head${heads.length === 1 ? "" : "s"}`;
      const buttons = heads.slice(0, LISTED).map(([name, value]) => headButton(name, `${name} ${value.toFixed(2)}`));
      return make("p", {}, make("span", {}, `${model.label}, ${task} (${more}, mean over ${seeds} seed${seeds === 1 ? "" : "s"}): `), ...(buttons.length ? buttons : ["none"]));
    }));
    return lines.length ? [make("h3", {}, "Heads that interfere"), make("p", { className: "note" }, "Learned gates close these heads (score 0.5 or more): the model does the task better without them."), ...lines] : [];
  }

  onSelect(show);
})();
