// A prompt: the probabilities of its answers with and without the circuit, and where the selected head looks.
"use strict";

(() => {
  const { data, find, make, fill, plain, token, colour, draw, scaled, percent, onScheme, onSelect, select, selected, exportButtons, plotSvg } = window.gatelens;
  if (!data.attention.length) return;

  const STEPS = 65535; // a weight is a whole number of 1/65535
  const LISTED = 5; // keys of a query that are listed in words
  const [prompts, openOnly, plot] = ["prompt", "open", "plot"].map((name) => find(`attention-${name}`));
  let query = 0;
  let head = null; // the last head that was selected, as [layer, head]

  const number = () => data.attention.findIndex(({ task, label }) => task === selected.state.task && label === selected.state.model);
  const view = () => data.attention[number()];
  const prompt = () => view().prompts[Math.min(selected.state.prompt, view().prompts.length - 1)];
  const tokens = () => prompt().tokens;
  const isLoaded = () => window.gatelens.patterns[number()] !== undefined;

  // Choose what is shown

  function chooseModel() {
    find("attention-content").hidden = !view();
    find("attention-missing").hidden = Boolean(view());
    if (!view()) return;
    fill(prompts, view().prompts.map(({ tokens: words }, i) => `${i + 1}: ${shorten(words.join(""))}`));
    prompts.closest("label").hidden = view().prompts.length < 2;
    openOnly.closest("label").hidden = !view().sparse;
    openOnly.checked = view().sparse;
    choosePrompt();
  }

  const shorten = (text) => (text.length > 60 ? `${text.slice(0, 57)}…` : text);

  function choosePrompt() {
    if (!view()) return;
    prompts.value = view().prompts.indexOf(prompt());
    query = tokens().length - 1;
    showPrompt();
    whenLoaded(number(), show);
  }

  // Patterns are scripts next to the page and are loaded on first use, because a page on disk may not fetch data.
  function whenLoaded(wanted, then) {
    if (isLoaded()) return then();
    const script = make("script", { src: `data/attention-${wanted}.js` });
    script.addEventListener("load", () => wanted === number() && then());
    script.addEventListener("error", () => { find("attention-status").textContent = `data/attention-${wanted}.js is missing.`; });
    document.head.append(script);
    return undefined;
  }

  // The prompt, its answers, and their probabilities with everything, with the circuit alone and without it

  function showPrompt() {
    const { answer, wrong, predictions } = prompt();
    find("attention-tokens").replaceChildren(...tokens().map((text, i) => {
      const button = make("button", { type: "button" }, token(text));
      button.addEventListener("click", () => { query = i; shade(); });
      return button;
    }));
    const answers = [make("span", {}, "Right answer: "), make("code", { className: "right" }, token(answer))];
    if (wrong !== null) answers.push(make("span", {}, ", wrong: "), make("code", { className: "wrong" }, token(wrong)));
    find("attention-answers").replaceChildren(...answers);
    const reasons = view().without.map((reason) => make("p", { className: "note" }, reason));
    find("attention-predictions").replaceChildren(...(predictions.length ? [predictionTable(predictions)] : []), ...reasons);
  }

  function predictionTable(predictions) {
    const hasWrong = predictions.some(({ wrong }) => wrong !== null);
    const titles = ["Open gates", "Right answer", ...(hasWrong ? ["Wrong answer"] : []), "Rank", "Most probable"];
    const rows = predictions.map(({ part, probability, wrong, rank, top }) => {
      const cells = [
        bar(probability, "helps"), ...(hasWrong ? [bar(wrong ?? 0, "hinders")] : []),
        make("td", { className: "number" }, rank.toLocaleString("en")), make("td", {}, ...top.map((text) => make("code", {}, token(text)))),
      ];
      cells.forEach((cell, i) => { cell.dataset.label = titles[i + 1]; });
      return make("tr", {}, make("th", { scope: "row" }, part), ...cells);
    });
    const head_ = make("tr", {}, ...titles.map((title) => make("th", { scope: "col", className: title === "Rank" ? "number" : "" }, title)));
    return make("table", { className: "cards predictions" }, make("thead", {}, head_), make("tbody", {}, ...rows));
  }

  function bar(share, kind) {
    const filled = make("span", { className: `filled ${kind}` });
    filled.style.setProperty("--share", `${100 * share}%`);
    return make("td", { className: "probability" }, make("span", { className: "share" }, percent(share)), filled);
  }

  // The weights (query, key) of the selected head; null for keys after the query and for hidden edges

  function decode(text) {
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  }

  function weights() {
    const pattern = window.gatelens.patterns[number()][prompts.value];
    pattern.numbers ??= new Uint16Array(decode(pattern.weights).buffer);
    if (pattern.open) pattern.gates ??= decode(pattern.open);
    const length = tokens().length;
    let at = (head[0] * view().heads + head[1]) * ((length * (length + 1)) / 2);
    return Array.from({ length }, (_, i) => Array.from({ length }, (_, j) => {
      if (j > i) return null;
      const closed = openOnly.checked && pattern.gates && !pattern.gates[at];
      return closed ? (at++, null) : pattern.numbers[at++] / STEPS;
    }));
  }

  function chooseHead() {
    const [, layer, index] = (selected.state.head.match(/^L(\d+)H(\d+)$/) ?? []).map(Number);
    const exists = view() && layer < view().layers && index < view().heads;
    if (exists) head = [layer, index];
    else if (!head || !view() || head[0] >= view().layers || head[1] >= view().heads) head = [0, 0];
  }

  const headName = () => `L${head[0]}H${head[1]}`;

  function show() {
    if (!view() || !isLoaded()) return; // it is called again when the patterns are loaded
    chooseHead();
    find("attention-head").textContent = `Attention of ${headName()}`;
    const words = tokens().map((text) => plain(token(text)));
    const z = weights();
    const places = words.map((_, i) => i);
    const every = Math.ceil(words.length / 60);
    const ticks = { tickvals: places.filter((i) => i % every === 0), ticktext: words.filter((_, i) => i % every === 0), fixedrange: true, zeroline: false, showgrid: false, tickfont: { size: scaled(11) } };
    const side = Math.min(plot.clientWidth || 600, scaled(Math.min(900, Math.max(340, 24 * words.length + 140))));
    draw(plot, [{
      type: "heatmap", x: places, y: places, z, zmin: 0, zmax: 1, xgap: 1, ygap: 1, hoverongaps: false,
      colorscale: [[0, colour("panel")], [1, colour("helps")]], colorbar: { thickness: scaled(10), outlinewidth: 0 },
      customdata: z.map((row, i) => row.map((_, j) => [words[i], words[j]])),
      hovertemplate: "%{customdata[0]} → %{customdata[1]}: %{z:.3f}<extra></extra>",
    }], {
      width: side, height: side, margin: { l: scaled(85), r: 10, t: 10, b: scaled(85) },
      xaxis: { ...ticks, tickangle: -90, title: { text: "key", standoff: 5 } },
      yaxis: { ...ticks, autorange: "reversed", title: { text: "query", standoff: 5 } },
    });
    const open = z.flat().filter((weight) => weight !== null).length;
    plot.setAttribute("aria-label", `Attention of head ${headName()}: ${open} edges shown. Choose a token above to read its keys.`);
    shade();
  }

  // Shade the tokens by their weights as keys of the chosen query, and list the strongest keys in words.
  function shade() {
    if (!isLoaded()) return;
    const row = weights()[query];
    [...find("attention-tokens").children].forEach((button, i) => {
      button.setAttribute("aria-pressed", i === query);
      button.style.setProperty("--weight", ((row[i] ?? 0) * 0.75).toFixed(3));
      button.title = row[i] === null ? "" : row[i].toFixed(3);
    });
    const best = row.map((weight, key) => [weight ?? -1, key]).filter(([weight]) => weight >= 0.001).sort((a, b) => b[0] - a[0]).slice(0, LISTED);
    const keys = best.flatMap(([weight, key], i) => [i ? ", " : "", make("code", {}, token(tokens()[key])), ` ${weight.toFixed(3)}`]);
    find("attention-status").replaceChildren(
      make("strong", {}, headName()), ": ", make("code", {}, token(tokens()[query])), " attends to ", ...(keys.length ? keys : ["nothing"]));
  }

  find("attention-bar").append(exportButtons(() => `attention ${selected.state.task} ${selected.state.model} ${headName()}`, () => plotSvg(plot), "attention of the selected head"));
  prompts.addEventListener("change", () => select({ prompt: Number(prompts.value) }));
  openOnly.addEventListener("change", show);
  addEventListener("resize", show);
  onScheme(show);
  onSelect((_, changed) => {
    if (changed.has("task") || changed.has("model")) chooseModel();
    else if (changed.has("prompt")) choosePrompt();
    else if (changed.has("head")) show();
  });
})();
