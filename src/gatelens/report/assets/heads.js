// Head maps: heat maps of a score for each layer and head. Point at a cell, or choose a head in the list.
"use strict";

(() => {
  const { data, find, make, fill, colour, draw, heat, scaled, onScheme } = window.gatelens;
  if (!data.heads.length) return;

  const [picker, heads, status] = ["head-map", "head-head", "head-status"].map(find);
  const width = (map) => map.z[0].length;

  function chooseMap() {
    const { maps } = data.heads[picker.value];
    const [layers, across] = [Math.max(...maps.map((map) => map.z.length)), Math.max(...maps.map(width))];
    const before = heads.value;
    const names = Array.from({ length: layers * across }, (_, i) => `L${Math.floor(i / across)}H${i % across}`);
    fill(heads, names.map((name) => [name, name]));
    heads.value = names.includes(before) ? before : best(maps[0]);
    show();
  }

  function best({ z }) {
    const all = z.flatMap((row, layer) => row.map((value, head) => [Math.abs(value), `L${layer}H${head}`]));
    return all.reduce((a, b) => (b[0] > a[0] ? b : a))[1];
  }

  function show() {
    const { maps, low, high, signed, label } = data.heads[picker.value];
    const parts = maps.map((map) => {
      const plot = make("div", { className: "plot" });
      plot.setAttribute("role", "img");
      plot.setAttribute("aria-label", `Heat map over layers and heads: ${map.name}. Choose a head in the list to read its score.`);
      return { map, plot, element: make("div", {}, make("h3", {}, map.name), plot) };
    });
    find("head-maps").replaceChildren(...parts.map((part) => part.element));
    for (const { map, plot } of parts) {
      const trace = {
        type: "heatmap", z: map.z, zmin: low, zmax: high, colorscale: heat(signed), xgap: 1, ygap: 1,
        hovertemplate: "L%{y}H%{x}: %{z:.3g}<extra></extra>", colorbar: { thickness: scaled(10), outlinewidth: 0, title: { text: label, side: "right", font: { size: scaled(11) } } },
      };
      draw(plot, [trace], {
        margin: { l: scaled(44), r: 0, t: 8, b: scaled(44) }, height: scaled(Math.min(900, Math.max(260, 16 * map.z.length + 60))),
        xaxis: { title: { text: "head", standoff: 5 }, fixedrange: true, dtick: Math.ceil(width(map) / 12), zeroline: false, showgrid: false },
        yaxis: { title: { text: "layer", standoff: 5 }, fixedrange: true, zeroline: false, showgrid: false, dtick: Math.ceil(map.z.length / 15) },
        shapes: [],
      });
      plot.on("plotly_hover", ({ points: [point] }) => {
        heads.value = `L${point.y}H${point.x}`;
        tell();
      });
    }
    tell();
  }

  // Show the scores of the chosen head, and draw a frame around it in every map.
  function tell() {
    const [layer, head] = heads.value.slice(1).split("H").map(Number);
    const { maps } = data.heads[picker.value];
    const values = maps.map((map) => `${map.name} ${map.z[layer]?.[head] === undefined ? "none" : Number(map.z[layer][head].toPrecision(3))}`);
    status.replaceChildren(make("strong", {}, heads.value), `: ${values.join(", ")}`);
    const frame = { type: "rect", x0: head - 0.5, x1: head + 0.5, y0: layer - 0.5, y1: layer + 0.5, line: { color: colour("ink"), width: 2 } };
    for (const plot of find("head-maps").querySelectorAll(".plot")) Plotly.relayout(plot, { shapes: [frame] });
  }

  fill(picker, data.heads.map((view) => view.title));
  picker.addEventListener("change", chooseMap);
  heads.addEventListener("change", tell);
  onScheme(show);
  chooseMap();
})();
