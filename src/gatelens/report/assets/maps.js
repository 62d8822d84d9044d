// Head maps: heat maps of a score for each layer and head. A click on a cell selects the head.
"use strict";

(() => {
  const { data, find, make, fill, colour, draw, heat, scaled, onScheme, onSelect, select, selected, exportButtons, plotSvg } = window.gatelens;
  if (!data.maps.length) return;

  const HEAD = /^L(\d+)H(\d+)$/;
  const [picker, status] = ["map-map", "map-status"].map(find);
  const width = (map) => map.z[0].length;
  const views = () => data.maps.filter(({ task }) => task === null || task === selected.state.task);
  const view = () => views()[picker.value];

  function chooseTask() {
    fill(picker, views().map(({ title }) => title), 0);
    find("map-section").classList.toggle("empty", !views().length);
    show();
  }

  function show() {
    const { maps, low, high, signed, label, title } = view() ?? { maps: [] };
    const parts = maps.map((map) => {
      const plot = make("div", { className: "plot" });
      plot.setAttribute("role", "img");
      plot.setAttribute("aria-label", `Heat map over layers and heads: ${map.name}. Select a head at the top of the page to read its score.`);
      const heading = make("div", { className: "bar" }, make("h3", {}, map.name), exportButtons(() => `${title} ${map.name}`, () => plotSvg(plot)));
      return { map, plot, element: make("figure", {}, heading, plot) };
    });
    find("map-maps").replaceChildren(...parts.map((part) => part.element));
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
      plot.on("plotly_click", ({ points: [point] }) => select({ head: `L${point.y}H${point.x}` }));
    }
    tell();
  }

  // The scores of the selected head, and a frame around it in every map
  function tell() {
    const [, layer, head] = (selected.state.head.match(HEAD) ?? []).map(Number);
    const maps = view()?.maps ?? [];
    const values = maps.map((map) => `${map.name} ${map.z[layer]?.[head] === undefined ? "none" : Number(map.z[layer][head].toPrecision(3))}`);
    status.replaceChildren(make("strong", {}, selected.state.head), `: ${values.join(", ")}`);
    const frame = { type: "rect", x0: head - 0.5, x1: head + 0.5, y0: layer - 0.5, y1: layer + 0.5, line: { color: colour("frame"), width: 2.5 } };
    for (const plot of find("map-maps").querySelectorAll(".plot")) Plotly.relayout(plot, { shapes: layer === undefined ? [] : [frame] });
  }

  picker.addEventListener("change", show);
  onScheme(show);
  onSelect((_, changed) => {
    if (changed.has("task")) chooseTask();
    else if (changed.has("head")) tell();
  });
})();
