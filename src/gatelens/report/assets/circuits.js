// Circuit graphs: one or two models side by side, with one slider and one chosen component for both.
"use strict";

(() => {
  const { data, find, make, fill, colour, signed, token, draw, scaled, onScheme } = window.gatelens;
  if (!data.circuits.length) return;

  const INPUTS = { q: { dash: "solid", shift: -0.007 }, k: { dash: "dash", shift: 0 }, v: { dash: "dot", shift: 0.007 }, "": { dash: "solid", shift: 0 } };
  const WIDTHS = [1, 2.2, 4]; // line widths, by the score relative to the largest one
  const SHAPES = [["KV", "circle", 7], ["H", "square", 10], ["M", "diamond", 11], ["", "square", 12]]; // symbol and size of a component, by a part of its name
  const LISTED = 12; // edges in a table
  const LABELLED = 90; // up to this many components have a label
  const controls = Object.fromEntries(["task", "left", "right", "component", "kept", "count"].map((name) => [name, find(`circuit-${name}`)]));
  let sides = []; // {data, element, plot, status, details, ...}
  let steps = []; // the numbers of edges that the slider can select
  let chosen = "";

  // Choose what is shown

  function chooseTask() {
    const view = data.circuits[controls.task.value];
    const labels = view.sides.map((side) => side.label);
    fill(controls.left, labels);
    fill(controls.right, [[-1, "none"], ...labels.map((label, i) => [i, label])]);
    const sparse = view.sides.findIndex((side) => side.sparse);
    controls.right.value = sparse > 0 ? sparse : labels.length > 1 ? 1 : -1;
    chooseSides();
  }

  function chooseSides() {
    const view = data.circuits[controls.task.value];
    const wanted = [controls.left.value, controls.right.value].filter((place) => place >= 0).map((place) => view.sides[place]);
    sides = wanted.map(makeSide);
    find("circuit-sides").replaceChildren(...sides.map((side) => side.element));
    const most = Math.max(...wanted.map((side) => side.score.length));
    const before = steps[controls.kept.value] ?? startingCount(wanted);
    steps = logSteps(most);
    controls.kept.max = steps.length - 1;
    controls.kept.value = nearest(before);
    const names = [...new Set(wanted.flatMap((side) => side.names))];
    fill(controls.component, [["", "none"], ...names.map((name) => [name, name])]);
    chosen = names.includes(chosen) ? chosen : "";
    controls.component.value = chosen;
    show();
  }

  function startingCount(wanted) {
    const counts = wanted.map((side) => side.count).filter((count) => count !== null && count <= 200);
    return counts.length ? Math.max(...counts) : 50;
  }

  function logSteps(most) {
    const spaced = Array.from({ length: 121 }, (_, i) => Math.round(most ** (i / 120)));
    return [...new Set(spaced)];
  }

  function nearest(count) {
    const at = steps.findIndex((step) => step >= count);
    return at < 0 ? steps.length - 1 : at;
  }

  function makeSide(side) {
    const plot = make("div", { className: "plot" });
    plot.setAttribute("role", "img");
    const status = make("p", { className: "status" });
    const details = make("div", { className: "details" });
    const heading = make("h3", {}, side.label);
    const element = make("article", { className: "side" }, heading, status, plot, details);
    const layers = new Set(side.names.map((name) => name.match(/\d+/)?.[0])).size;
    const height = Math.min(1000, Math.max(420, 26 * layers + 120));
    return { data: side, element, plot, status, details, height, most: Math.max(...side.score.map(Math.abs)) || 1, heard: false };
  }

  // Show it

  function show() {
    const kept = steps[controls.kept.value];
    const text = `${kept} edge${kept === 1 ? "" : "s"} kept`;
    controls.count.value = text;
    controls.kept.setAttribute("aria-valuetext", text);
    for (const side of sides) {
      drawGraph(side, kept);
      tell(side, kept);
      describe(side, kept);
    }
  }

  const onPath = (side, edge, kept) => side.joins[edge] > 0 && side.joins[edge] <= kept;

  function drawGraph(side, kept) {
    const { source, destination, input, score, links } = side.data;
    const { x, y } = side.data.places.find(({ most }) => kept <= most) ?? side.data.places.at(-1);
    const here = side.data.names.indexOf(chosen);
    const paths = new Map(); // edges with the same look are drawn as one path: a thousand separate lines would be too slow
    const used = new Set(); // components with an edge; those on a path come first
    const dangling = new Set();

    function line(look, from, to, shift) {
      const key = Object.values(look).join(" ");
      if (!paths.has(key)) paths.set(key, { look, steps: [] });
      paths.get(key).steps.push(`M${x[from]},${y[from]}L${(x[to] + shift).toFixed(4)},${y[to]}`);
    }

    const [helps, hinders, pale, soft, node] = ["helps", "hinders", "pale", "soft", "node"].map(colour);
    for (let edge = Math.min(kept, score.length) - 1; edge >= 0; edge--) {
      const [from, to, live] = [source[edge], destination[edge], onPath(side.data, edge, kept)];
      const own = from === here || to === here; // an edge of the chosen component
      const { dash, shift } = INPUTS[input[edge]];
      (live ? used : dangling).add(from).add(to);
      if (live) {
        const share = Math.abs(score[edge]) / side.most;
        const width = WIDTHS[share > 0.5 ? 2 : share > 0.15 ? 1 : 0];
        const opacity = here < 0 ? 0.75 : own ? 1 : 0.12;
        line({ color: score[edge] >= 0 ? helps : hinders, width, dash, opacity }, from, to, shift);
      } else {
        line({ color: own ? soft : pale, width: 1, dash: "solid", opacity: here < 0 || own ? 1 : 0.4 }, from, to, shift);
      }
    }
    dangling.forEach((component) => used.add(component));
    for (const [a, b] of links) {
      if (used.has(a) && used.has(b)) line({ color: node, width: 1, dash: "solid", opacity: 0.5 }, a, b, 0);
    }
    const shapes = [...paths.values()].sort((a, b) => a.look.opacity - b.look.opacity).map(({ look: { opacity, ...look }, steps: path }) => (
      { type: "path", path: path.join(""), layer: "below", line: look, opacity }));
    const height = scaled(side.height);
    draw(side.plot, nodes(side, [...used], { x, y }, here, height), {
      shapes, margin: { l: 8, r: 8, t: 8, b: 8 }, height,
      xaxis: { visible: false, range: [-0.04, 1.04], fixedrange: true }, yaxis: { visible: false, range: [-0.03, 1.05], fixedrange: true },
    });
    const shown = `${used.size} components of ${side.data.label}`;
    side.plot.setAttribute("aria-label", `Circuit graph: ${shown}. Choose a component in the list to read its edges.`);
    if (!side.heard) {
      side.heard = true;
      side.plot.on("plotly_hover", (event) => choose(event.points[0].customdata));
    }
  }

  // Components as traces, one for each symbol, so that plotly does not have to style every point separately.
  function nodes(side, places, { x, y }, here, height) {
    const { names } = side.data;
    const few = places.length <= LABELLED;
    const wanted = places.filter((i) => i === here || (few && !names[i].includes("KV"))).sort((a, b) => (b === here) - (a === here));
    const labelled = withRoom(wanted, (i) => (
      { x: x[i] * side.plot.clientWidth, y: y[i] * height, width: scaled(6.5) * names[i].length, height: scaled(13) }));
    const [accent, plain, ink, panel] = ["accent", "node", "ink", "panel"].map(colour);
    const shape = (i) => SHAPES.find(([part]) => names[i].includes(part)) ?? SHAPES.at(-1);

    function trace(members, symbol, size, color) {
      return {
        x: members.map((i) => x[i]), y: members.map((i) => y[i]), customdata: members.map((i) => names[i]), hovertemplate: "%{customdata}<extra></extra>",
        text: members.map((i) => (labelled.has(i) ? names[i] : "")), textposition: "top center", textfont: { size: scaled(10), color: ink },
        mode: members.some((i) => labelled.has(i)) ? "markers+text" : "markers", cliponaxis: false,
        marker: { symbol, size: scaled(size), color, opacity: 1, line: { color: panel, width: 1 } },
      };
    }

    const others = SHAPES.map(([, symbol, size], at) => trace(places.filter((i) => i !== here && shape(i) === SHAPES[at]), symbol, size, plain));
    const chosenOne = places.filter((i) => i === here);
    return [...others, ...chosenOne.map((i) => trace([i], shape(i)[1], shape(i)[2] + 5, accent))];
  }

  // The places whose labels do not overlap an earlier label, in this order.
  function withRoom(places, box) {
    const taken = [];
    return new Set(places.filter((i) => {
      const label = box(i);
      const free = taken.every((other) => Math.abs(other.x - label.x) * 2 > other.width + label.width || Math.abs(other.y - label.y) > label.height);
      if (free) taken.push(label);
      return free;
    }));
  }

  function tell(side, kept) {
    const { joins, score, total, curve, needed, threshold } = side.data;
    const asked = Math.min(kept, score.length);
    const live = joins.filter((join) => join > 0 && join <= asked).length;
    const at = curve.asked.findLastIndex((k) => k <= asked);
    side.status.replaceChildren(
      make("strong", {}, `${live} of ${asked} edges are on a path`), `, of ${total.toLocaleString("en")} in all. `,
      `The top ${curve.asked[at].toLocaleString("en")} explain ${curve.effect[at].toFixed(2)} of the effect; ${Math.round(100 * threshold)} % needs ${needed}.`,
    );
  }

  // The chosen component

  function choose(name) {
    if (name === chosen) return;
    chosen = name;
    controls.component.value = name;
    show();
  }

  function describe(side, kept) {
    const { names, scores, attends, source, destination, input, score } = side.data;
    const here = names.indexOf(chosen);
    const end = (edge) => names[destination[edge]] + (input[edge] ? `.${input[edge]}` : "");
    const edges = Array.from({ length: Math.min(kept, score.length) }, (_, edge) => edge);
    if (here < 0) {
      const text = chosen ? [make("p", { className: "note" }, `${chosen} has none of the first ${score.length} edges of this model.`)] : [];
      side.details.replaceChildren(...text, table("Top edges", side, edges, (edge) => `${names[source[edge]]} → ${end(edge)}`, kept));
      return;
    }
    const inward = edges.filter((edge) => destination[edge] === here);
    const outward = edges.filter((edge) => source[edge] === here);
    const total = scores[here] === null ? "" : `, score ${signed(scores[here])} (the sum over all edges that leave it)`;
    side.details.replaceChildren(
      make("h4", {}, chosen + total),
      make("div", { className: "tables" },
        table("From", side, inward, (edge) => names[source[edge]] + (input[edge] ? ` (${input[edge]})` : ""), kept),
        table("To", side, outward, end, kept)),
      ...looks(attends[here]),
    );
  }

  function table(title, side, edges, name, kept) {
    const rows = edges.slice(0, LISTED).map((edge) => {
      const score = side.data.score[edge];
      const text = name(edge) + (onPath(side.data, edge, kept) ? "" : " (not on a path)");
      return make("tr", {}, make("td", {}, text), make("td", { className: `number ${score < 0 ? "hinders" : "helps"}` }, signed(score)));
    });
    const more = edges.length > LISTED ? `, the first ${LISTED} of ${edges.length}` : "";
    const body = rows.length ? rows : [make("tr", {}, make("td", {}, "none"))];
    return make("div", {}, make("h4", {}, title + more), make("table", {}, make("tbody", {}, ...body)));
  }

  function looks(pairs) {
    if (!pairs.length) return [];
    const items = pairs.map(([query, key, weight]) => make("li", {}, make("code", {}, token(query)), " → ", make("code", {}, token(key)), ` ${weight.toFixed(2)}`));
    return [make("h4", {}, "Attends from → to (first example prompt, without the first token)"), make("ul", { className: "pairs" }, ...items)];
  }

  fill(controls.task, data.circuits.map((view) => view.title));
  controls.task.addEventListener("change", chooseTask);
  controls.left.addEventListener("change", chooseSides);
  controls.right.addEventListener("change", chooseSides);
  controls.kept.addEventListener("input", show);
  controls.component.addEventListener("change", () => choose(controls.component.value));
  onScheme(show);
  chooseTask();
})();
