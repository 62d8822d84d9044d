// The headline figure: explained effect against the number of gates kept, one panel for each task. A click on a point
// selects the head that enters the circuit there.
"use strict";

(() => {
  const { data, find, make, fill, plain, colour, draw, scaled, onScheme, onSelect, exportButtons, plotSvg } = window.gatelens;
  if (!data.curves.length) return;

  const LINES = 4; // colours of models
  const picker = find("effect-gates");
  let panels = []; // {data, plot}

  const view = () => data.curves[picker.value];
  const models = [...new Set(data.curves.flatMap(({ panels: all }) => all.flatMap((panel) => panel.models.map(({ label }) => label))))];
  const lineColour = (label) => colour(`line-${models.indexOf(label) % LINES}`);

  function chooseGates() {
    panels = view().panels.map(makePanel);
    find("effect-panels").replaceChildren(...panels.map(({ element }) => element));
    find("effect-panels").classList.toggle("single", panels.length === 1);
    show();
  }

  function makePanel(panel) {
    const plot = make("div", { className: "plot" });
    plot.setAttribute("role", "img");
    const needed = panel.models.map((model) => `${model.label}: ${model.needed}`).join("; ");
    plot.setAttribute("aria-label", `Explained effect against ${view().noun} kept, ${panel.title}. Needed for ${100 * panel.threshold} %: ${needed}.`);
    const counts = panel.models.map((model) => {
      const swatch = make("span", { className: "swatch" });
      swatch.style.background = `var(--line-${models.indexOf(model.label) % LINES})`;
      const value = model.count === null ? "" : `${model.count.toLocaleString("en")} of ${model.total.toLocaleString("en")}`;
      return make("li", {}, swatch, make("span", {}, model.label), make("strong", {}, value || "not reached"), make("span", { className: "soft" }, model.needed.replace(/^[^(]*/, "")));
    });
    const ratios = panel.ratios.map((ratio) => make("li", { className: ratio.clear ? "ratio" : "ratio unclear" }, make("span", {}, `${ratio.dense} / ${ratio.sparse}`), make("strong", {}, ratio.text)));
    const name = () => `${panel.title}, ${view().title}`;
    const caption = make("figcaption", {},
      make("p", { className: "note" }, `${view().noun[0].toUpperCase()}${view().noun.slice(1)} needed for ${Math.round(100 * panel.threshold)} % of the effect, with 95 % interval`),
      make("ul", { className: "counts" }, ...counts, ...ratios));
    const heading = make("div", { className: "bar" }, make("h3", {}, panel.title), exportButtons(name, () => plotSvg(plot)));
    return { data: panel, plot, heard: false, element: make("figure", { className: "panel" }, heading, plot, caption) };
  }

  function show() {
    for (const panel of panels) {
      const { noun, log } = view();
      const [soft, line, paper] = ["soft", "line", "paper"].map(colour);
      const traces = panel.data.models.flatMap((model) => modelTraces(model, log));
      const axis = { fixedrange: true, gridcolor: line, zeroline: false, linecolor: line, ticks: "outside", tickcolor: line };
      draw(panel.plot, traces, {
        height: scaled(panels.length === 1 ? 380 : 300), margin: { l: scaled(52), r: scaled(16), t: scaled(12), b: scaled(48) },
        xaxis: { ...axis, type: log ? "log" : "linear", title: { text: `${noun} kept`, standoff: 8 }, ...(log ? { dtick: 1 } : { rangemode: "tozero" }) },
        yaxis: { ...axis, title: { text: "explained effect", standoff: 8 }, range: limits(panel.data) },
        shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: panel.data.threshold, y1: panel.data.threshold, line: { color: soft, width: 1, dash: "dash" } }, ...markLines(panel.data, log)],
        annotations: [...ratioLabels(panel.data, paper), ...markLabels(panel.data, log, paper)],
      });
      if (!panel.heard) {
        panel.heard = true;
        panel.plot.on("plotly_click", ({ points: [point] }) => choose(panel.data, point));
      }
    }
  }

  // A little beyond all lines and bands, and at least beyond 0 and 1
  function limits({ models: all }) {
    const values = all.flatMap((model) => [...model.low, ...model.high, ...(model.random?.effect ?? [])]);
    const [low, high] = [Math.min(0, ...values), Math.max(1, ...values)];
    return [low - 0.05 * (high - low), high + 0.05 * (high - low)];
  }

  function modelTraces(model, log) {
    const points = model.kept.map((_, i) => i).filter((i) => !log || model.kept[i] > 0);
    const at = (values) => points.map((i) => values[i]);
    const stroke = lineColour(model.label);
    const [x, low, high] = [at(model.kept), at(model.low), at(model.high)];
    const random = model.random ? [{ x: model.random.kept, y: model.random.effect, mode: "lines", line: { color: colour("pale"), width: 1.5 }, hoverinfo: "skip" }] : [];
    return [
      ...random,
      { x: [...x, ...x.slice().reverse()], y: [...high, ...low.slice().reverse()], fill: "toself", mode: "lines", line: { width: 0 }, fillcolor: stroke, opacity: 0.16, hoverinfo: "skip" },
      {
        x, y: at(model.effect), mode: "lines+markers", line: { color: stroke, width: 2.5 }, marker: { color: stroke, size: scaled(7) }, name: plain(model.label), meta: model.label,
        customdata: points.map((i) => [i, entering(model, model.asked[i]), model.low[i].toFixed(2), model.high[i].toFixed(2)]),
        hovertemplate: `<b>%{y:.2f}</b> (%{customdata[2]} to %{customdata[3]}) with %{x:,.0f} ${view().noun}<br>the last one: %{customdata[1]}<extra>${plain(model.label)}</extra>`,
      },
    ];
  }

  const entering = (model, k) => model.order[k - 1] ?? "-";

  function choose(panel, point) {
    const model = panel.models.find(({ label }) => label === point.data.meta);
    if (!model) return;
    const head = model.order[model.asked[point.customdata[0]] - 1];
    window.gatelens.select({ task: panel.task, model: model.label, ...(head ? { head } : {}) });
  }

  // The selected head: where it enters the circuit of the selected model

  function marked({ task, models: all }) {
    const { state } = window.gatelens.selected;
    const model = task === state.task ? all.find(({ label }) => label === state.model) : undefined;
    const rank = model ? model.order.indexOf(state.head) + 1 : 0;
    if (!rank) return null;
    const after = model.asked.findIndex((k) => k >= rank); // circuits may keep fewer gates than were asked for
    const [k0, k1, x0, x1] = [model.asked[after - 1] ?? 0, model.asked[after], model.kept[after - 1] ?? 0, model.kept[after]];
    return { head: state.head, rank, x: x0 + ((x1 - x0) * (rank - k0)) / Math.max(1, k1 - k0) };
  }

  function markLines(panel, log) {
    const mark = marked(panel);
    if (!mark || (log && mark.x <= 0)) return [];
    return [{ type: "line", yref: "paper", x0: mark.x, x1: mark.x, y0: 0, y1: 1, line: { color: colour("accent"), width: 1.5, dash: "dot" } }];
  }

  function markLabels(panel, log, paper) {
    const mark = marked(panel);
    if (!mark || (log && mark.x <= 0)) return [];
    const x = log ? Math.log10(mark.x) : mark.x;
    return [{ x, y: 0, yref: "paper", yanchor: "bottom", xanchor: "left", xshift: 4, text: `${mark.head}, rank ${mark.rank}`, showarrow: false, bgcolor: paper, font: { color: colour("accent"), size: scaled(11) } }];
  }

  // At the right end of the threshold's line, where the curves are above it
  function ratioLabels({ ratios, threshold }, paper) {
    if (ratios.length !== 1) return [];
    return [{ xref: "paper", x: 1, xanchor: "right", y: threshold, yanchor: "top", yshift: -3, text: ratios[0].brief, showarrow: false, bgcolor: paper, font: { color: colour(ratios[0].clear ? "ink" : "soft") } }];
  }

  fill(picker, data.curves.map(({ title }) => title), Math.max(0, data.curves.findIndex(({ title }) => title === data.first.gates)));
  picker.closest("label").hidden = data.curves.length < 2;
  picker.addEventListener("change", chooseGates);
  onScheme(show);
  chooseGates();
  onSelect((_, changed) => ["task", "model", "head"].some((key) => changed.has(key)) && show());
})();
