// The attention of one head on one prompt: a heat map, and the keys of a chosen query, shaded in the text.
"use strict";

(() => {
  const { data, find, make, fill, plain, token, colour, draw, scaled, onScheme } = window.gatelens;
  if (!data.attention.length) return;

  const STEPS = 65535; // a weight is a whole number of 1/65535
  const LISTED = 5; // keys of a query that are listed in words
  const [runs, prompts, heads, openOnly] = ["run", "prompt", "head", "open"].map((name) => find(`attention-${name}`));
  const plot = find("attention-plot");
  let query = 0;

  const view = () => data.attention[runs.value];
  const tokens = () => view().prompts[prompts.value].tokens;
  const isLoaded = () => window.gatelens.patterns[runs.value] !== undefined;

  // Choose what is shown

  function chooseRun() {
    const { prompts: all, layers, heads: across, sparse, best } = view();
    const before = heads.value;
    fill(prompts, all.map(({ tokens: words }, i) => `${i + 1}: ${shorten(words.join(" "))}`));
    fill(heads, Array.from({ length: layers * across }, (_, i) => `L${Math.floor(i / across)}H${i % across}`));
    heads.value = before && before < layers * across ? before : best;
    openOnly.disabled = !sparse;
    openOnly.checked = sparse;
    whenLoaded(runs.value, choosePrompt);
  }

  const shorten = (text) => (text.length > 60 ? `${text.slice(0, 57)}…` : text);

  // Patterns are scripts next to the page and are loaded on first use, because a page on disk may not fetch data.
  function whenLoaded(number, then) {
    if (window.gatelens.patterns[number]) return then();
    const script = make("script", { src: `data/attention-${number}.js` });
    script.addEventListener("load", () => number === runs.value && then());
    script.addEventListener("error", () => { find("attention-status").textContent = `data/attention-${number}.js is missing.`; });
    document.head.append(script);
    return undefined;
  }

  function choosePrompt() {
    if (!isLoaded()) return;
    query = tokens().length - 1;
    find("attention-tokens").replaceChildren(...tokens().map((text, i) => {
      const button = make("button", { type: "button" }, token(text));
      button.addEventListener("click", () => { query = i; shade(); });
      return button;
    }));
    show();
  }

  // The weights (query, key) of the chosen head; null for keys after the query and for hidden edges

  function decode(text) {
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  }

  function weights() {
    const pattern = window.gatelens.patterns[runs.value][prompts.value];
    pattern.numbers ??= new Uint16Array(decode(pattern.weights).buffer);
    if (pattern.open) pattern.gates ??= decode(pattern.open);
    const length = tokens().length;
    const pairs = (length * (length + 1)) / 2;
    let at = heads.value * pairs;
    return Array.from({ length }, (_, i) => Array.from({ length }, (_, j) => {
      if (j > i) return null;
      const closed = openOnly.checked && pattern.gates && !pattern.gates[at];
      return closed ? (at++, null) : pattern.numbers[at++] / STEPS;
    }));
  }

  // Show it

  function show() {
    if (!isLoaded()) return; // it is called again when the patterns are loaded
    const words = tokens().map((text) => plain(token(text)));
    const z = weights();
    const places = words.map((_, i) => i);
    const every = Math.ceil(words.length / 60);
    const ticks = { tickvals: places.filter((i) => i % every === 0), ticktext: words.filter((_, i) => i % every === 0), fixedrange: true, zeroline: false, showgrid: false, tickfont: { size: scaled(11) } };
    const width = plot.clientWidth || 600;
    const side = Math.min(width, scaled(Math.min(900, Math.max(340, 24 * words.length + 140))));
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
    const name = heads.selectedOptions[0].text;
    plot.setAttribute("aria-label", `Attention of head ${name}: ${open} edges shown. Choose a token above to read its keys.`);
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
      make("strong", {}, heads.selectedOptions[0].text), ": ", make("code", {}, token(tokens()[query])), " attends to ", ...(keys.length ? keys : ["nothing"]));
  }

  fill(runs, data.attention.map((run) => run.label));
  runs.addEventListener("change", chooseRun);
  prompts.addEventListener("change", choosePrompt);
  heads.addEventListener("change", show);
  openOnly.addEventListener("change", show);
  addEventListener("resize", show);
  onScheme(show);
  chooseRun();
})();
