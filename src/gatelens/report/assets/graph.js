// Circuit graphs: the selected model and another one beside it. Every edge that is drawn is on a path from the embedding
// to the logits.
"use strict";

(() => {
  const { data, find, make, shape, fill, signed, token, layout, onSelect, select, selected, exportButtons, drawingSvg } = window.gatelens;
  if (!data.circuits.length) return;

  const WIDTHS = [1, 1.8, 3.2]; // of lines, by the score relative to the largest one
  const PORTS = { q: -0.28, k: 0, v: 0.28, "": 0 }; // where an edge enters a component, in widths of it
  const STAGES = [30, 75, 150, 250, Infinity]; // components keep their places while the number of edges stays in a stage
  const LISTED = 10; // edges in a table
  const ROLE_NAMES = 22; // room for the names of roles, below
  const AXIS = 34; // room for the numbers of layers
  const [methods, beside, components] = ["method", "beside", "component"].map((name) => find(`graph-${name}`));
  let sides = []; // {data, element, slider, count, status, box, details, places, size}

  const views = () => data.circuits.filter(({ task }) => task === selected.state.task);
  const view = () => views()[methods.value] ?? views()[0];

  // Choose what is shown

  function chooseTask() {
    fill(methods, views().map(({ gates }) => gates), 0);
    methods.closest("label").hidden = views().length < 2;
    chooseModel();
  }

  function chooseModel() {
    const others = (view()?.sides ?? []).map(({ label }) => label).filter((label) => label !== selected.state.model);
    const own = view()?.sides.find(({ label }) => label === selected.state.model);
    const other = others.find((label) => view().sides.find((side) => side.label === label).sparse !== own?.sparse) ?? others[0];
    const before = others.includes(beside.value) || (beside.value === "" && beside.dataset.chosen) ? beside.value : other ?? "";
    fill(beside, [["", "none"], ...others.map((label) => [label, label])], before);
    beside.closest("label").hidden = !others.length;
    chooseSides();
  }

  function chooseSides() {
    const wanted = (view()?.sides ?? []).filter(({ label, names }) => names.length && [selected.state.model, beside.value].includes(label));
    sides = wanted.map(makeSide);
    find("graph-sides").replaceChildren(...sides.map((side) => side.element));
    if (!sides.length) find("graph-sides").replaceChildren(make("p", { className: "note" }, "There is no circuit of edges for this task and model: gatelens circuit --level edges finds one."));
    show();
  }

  function makeSide(side) {
    const slider = make("input", { type: "range", min: 0, max: side.circuits.length - 1 });
    const count = make("output");
    const [status, box, details] = [make("p", { className: "status" }), make("div", { className: "scroll graph" }), make("div", { className: "details" })];
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", `Drawing of the circuit of ${side.label}`);
    slider.addEventListener("input", () => select({ edges: side.circuits[slider.value][0] }));
    const made = { data: side, slider, count, status, box, details, places: new Map() };
    const buttons = exportButtons(() => `circuit ${selected.state.task} ${side.label}`, () => drawingSvg(box.querySelector("svg")));
    made.element = make("article", { className: "side" },
      make("div", { className: "bar" }, make("h3", {}, side.label), buttons),
      make("label", { className: "slider" }, make("span", {}, "Edges"), slider, count), status, box, details);
    return made;
  }

  // The largest circuit with at most so many edges, or the smallest one
  function circuitOf({ circuits, count }) {
    const asked = selected.state.edges ?? (count !== null && count <= 150 ? count : 60);
    return Math.max(0, circuits.findLastIndex(([size]) => size <= asked));
  }

  // Show it

  function show() {
    const drawn = new Set();
    for (const side of sides) {
      const at = circuitOf(side.data);
      const [size, k] = side.data.circuits[at];
      const text = `${size} ${size === 1 ? view().noun.replace("edges", "edge") : view().noun}`;
      side.size = size;
      side.slider.value = at;
      side.slider.setAttribute("aria-valuetext", text);
      side.count.value = text;
      drawGraph(side).forEach((name) => drawn.add(name));
      tell(side, k);
      describe(side);
    }
    listComponents(drawn);
  }

  const edgesOf = ({ data: { source, destination, input, score, names } }, most) => (
    score.slice(0, most).map((value, i) => ({ from: names[source[i]], to: names[destination[i]], input: input[i], score: value, weight: Math.abs(value) })));

  // Pairs of names: the keys and values of a layer, and a head that reads them
  const linksOf = ({ data: { links, names } }) => links.map((pair) => pair.map((i) => names[i]));

  // Places are computed once for each stage, for all edges of the stage.
  function placesOf(side) {
    const stage = STAGES.find((most) => side.size <= most);
    if (!side.places.has(stage)) side.places.set(stage, placeAll(side, edgesOf(side, stage)));
    return side.places.get(stage);
  }

  const placeAll = (side, edges) => (side.data.roles.length ? layout.placeByRole(edges, linksOf(side), side.data.roles) : layout.place(edges, linksOf(side)));

  // Draw a side; returns the names of its components.
  function drawGraph(side) {
    const edges = edgesOf(side, side.size);
    const used = new Set(edges.flatMap(({ from, to }) => [from, to]));
    const { nodes, width, height, columns } = layout.fit(placesOf(side), Math.max(260, side.box.clientWidth - AXIS - 2));
    side.isWide = width + AXIS > side.box.clientWidth;
    const links = linksOf(side).filter((pair) => pair.every((name) => used.has(name)));
    const most = Math.max(...edges.map(({ weight }) => weight)) || 1;
    const drawn = new Set([...used].map(componentOf));
    const head = drawn.has(selected.state.head) ? selected.state.head : null;
    const below = columns.length ? ROLE_NAMES : 0;
    const drawing = shape("svg", { viewBox: `0 0 ${width + AXIS} ${height + below}`, width: width + AXIS, height: height + below, role: "img", class: head ? "has-selection" : "" });
    drawing.setAttribute("aria-label", `Circuit of ${side.data.label}: ${edges.length} ${view().noun} between ${drawn.size} components. The list above has the components, and the tables below have the edges.`);
    const moved = shape("g", { transform: `translate(${AXIS} 0)` });
    moved.append(
      ...columns.flatMap((column) => columnShapes(column, height)),
      ...links.map(([a, b]) => shape("path", { class: "link", d: curve(nodes.get(a), nodes.get(b), 0) })),
      // The strongest edges are drawn last, in front; those of the selected component in front of all.
      ...edges.slice().sort((a, b) => isOwn(a, head) - isOwn(b, head) || a.weight - b.weight).map((edge) => edgeShape(edge, nodes, most, head)),
      ...[...used].map((name) => nodeShape(name, nodes.get(name), head)));
    drawing.append(...layerNumbers(used, nodes), moved);
    side.box.replaceChildren(drawing);
    return drawn;
  }

  const componentOf = (name) => layout.parts(name).component;
  const isOwn = ({ from, to }, head) => componentOf(from) === head || componentOf(to) === head;

  // The column of a role: a line at its left, and its name below, shortened to fit
  function columnShapes({ role, left, right }, height) {
    const letters = Math.max(3, Math.floor((right - left) / 6.7));
    const name = shape("text", { class: "role", x: (left + right) / 2, y: height + ROLE_NAMES - 6, "text-anchor": "middle" }, role.length > letters ? `${role.slice(0, letters - 1)}…` : role);
    name.append(shape("title", {}, role));
    return [shape("line", { class: "column", x1: left, x2: left, y1: 0, y2: height + ROLE_NAMES }), name];
  }

  function curve(low, high, port) {
    const [x0, y0, x1, y1] = [low.x, low.y - layout.nodeHeight / 2, high.x + port * high.width, high.y + layout.nodeHeight / 2];
    if (low.y === high.y) return `M${low.x.toFixed(1)},${low.y.toFixed(1)}L${high.x.toFixed(1)},${high.y.toFixed(1)}`; // the same head at two roles
    const bend = Math.max(8, 0.45 * (y0 - y1));
    return `M${x0.toFixed(1)},${y0.toFixed(1)}C${x0.toFixed(1)},${(y0 - bend).toFixed(1)} ${x1.toFixed(1)},${(y1 + bend).toFixed(1)} ${x1.toFixed(1)},${y1.toFixed(1)}`;
  }

  function edgeShape(edge, nodes, most, head) {
    const share = edge.weight / most;
    const classes = ["edge", edge.score < 0 ? "hinders" : "helps", `into-${edge.input || "x"}`, ...(isOwn(edge, head) ? ["own"] : [])];
    const path = shape("path", { class: classes.join(" "), d: curve(nodes.get(edge.from), nodes.get(edge.to), PORTS[edge.input]), "stroke-width": WIDTHS[share > 0.4 ? 2 : share > 0.12 ? 1 : 0] });
    path.append(shape("title", {}, `${componentOf(edge.from)} → ${endOf(edge)}: ${signed(edge.score)}`));
    return path;
  }

  const atRole = (name) => (layout.parts(name).role ? ` at ${layout.parts(name).role}` : "");
  const endOf = ({ to, input }) => componentOf(to) + (input ? `.${input}` : "") + atRole(to);

  function nodeShape(full, { x, y, width }, head) {
    const name = componentOf(full);
    const kind = /KV/.test(name) ? "kv" : /^L/.test(name) ? "head" : /^M/.test(name) ? "mlp" : "end";
    const node = shape("g", { class: `node ${kind} ${name === head ? "selected" : ""}`, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
    node.append(
      shape("rect", { x: -width / 2, y: -layout.nodeHeight / 2, width, height: layout.nodeHeight, rx: kind === "mlp" ? 9 : 3 }),
      shape("text", { "text-anchor": "middle", y: 4 }, name));
    if (full !== name) node.append(shape("title", {}, full));
    node.dataset.name = name;
    node.addEventListener("click", () => select({ head: name }));
    return node;
  }

  // The number of each layer at the left, at its lowest row, as far as there is room
  function layerNumbers(used, nodes) {
    const lowest = new Map();
    used.forEach((name) => {
      const layer = layout.layerOf(name);
      if (layer >= 0 && layer < Infinity) lowest.set(layer, Math.max(lowest.get(layer) ?? 0, nodes.get(name).y));
    });
    return [...lowest].map(([layer, y]) => shape("text", { class: "layer", x: AXIS - 10, y: y + 4, "text-anchor": "end" }, String(layer)));
  }

  function tell(side, k) {
    const { total, kept, effect, needed, threshold } = side.data;
    const components = new Set([...side.box.querySelectorAll(".node")].map((node) => node.dataset.name)).size;
    const at = kept.findLastIndex((count) => count <= side.size);
    const measured = Math.round(kept[at]) === side.size ? "They explain" : `The nearest measured circuit has ${Math.round(kept[at]).toLocaleString("en")} ${view().noun} and explains`;
    side.status.replaceChildren(
      make("strong", {}, side.count.value), ` between ${components} components, from the first ${k.toLocaleString("en")} of the ranking (${total.toLocaleString("en")} in all). `,
      at < 0 ? "" : `${measured} ${effect[at].toFixed(2).replace("-0.00", "0.00")} of the effect; `, `${Math.round(100 * threshold)} % needs ${needed}.`,
      side.isWide ? " The drawing is wider than its frame: scroll it sideways." : "");
  }

  // Exactly the components that are drawn can be chosen in the list.
  function listComponents(drawn) {
    const { head } = selected.state;
    const names = [...drawn].sort((a, b) => layout.layerOf(a) - layout.layerOf(b) || a.localeCompare(b, "en", { numeric: true }));
    fill(components, [["", drawn.has(head) ? "none" : `${head} is not drawn`], ...names.map((name) => [name, name])], drawn.has(head) ? head : "");
  }

  // The selected component

  function describe(side) {
    const { names, scores, attends } = side.data;
    const { head } = selected.state;
    const edges = edgesOf(side, side.size).sort((a, b) => b.weight - a.weight);
    const own = edges.filter((edge) => isOwn(edge, head));
    if (!own.length) {
      side.details.replaceChildren(table("Strongest edges", edges, (edge) => `${componentOf(edge.from)} → ${endOf(edge)}`));
      return;
    }
    const at = names.findIndex((name) => componentOf(name) === head);
    const total = scores[at] === null ? "" : `, score ${signed(scores[at])} (the sum over all edges that leave it)`;
    side.details.replaceChildren(
      make("h4", {}, head + total),
      make("div", { className: "tables" },
        table("From", own.filter(({ to }) => componentOf(to) === head), ({ from, input }) => componentOf(from) + (input ? ` (${input})` : "") + atRole(from), linked(side, 1)),
        table("To", own.filter(({ from }) => componentOf(from) === head), endOf, linked(side, 0))),
      ...looks(attends[at]));
  }

  // The drawn components that share keys and values with the selected one: the heads that read them (end 0), or whose it reads (end 1)
  function linked(side, end) {
    const used = new Set(edgesOf(side, side.size).flatMap(({ from, to }) => [from, to]));
    const own = linksOf(side).filter((pair) => componentOf(pair[end]) === selected.state.head && pair.every((name) => used.has(name)));
    return [...new Set(own.map((pair) => pair[1 - end]))]; // a head at several roles reads the same keys and values
  }

  function table(title, edges, name, others = []) {
    const rows = edges.slice(0, LISTED).map((edge) => (
      make("tr", {}, make("td", {}, name(edge)), make("td", { className: `number ${edge.score < 0 ? "hinders" : "helps"}` }, signed(edge.score)))));
    const more = edges.length > LISTED ? `, the first ${LISTED} of ${edges.length}` : "";
    rows.push(...others.map((other) => make("tr", {}, make("td", {}, other), make("td", { className: "soft" }, "keys and values"))));
    const body = rows.length ? rows : [make("tr", {}, make("td", {}, "none"))];
    return make("div", {}, make("h4", {}, title + more), make("table", {}, make("tbody", {}, ...body)));
  }

  function looks(pairs) {
    if (!pairs.length) return [];
    const items = pairs.map(([query, key, weight]) => make("li", {}, make("code", {}, token(query)), " → ", make("code", {}, token(key)), ` ${weight.toFixed(2)}`));
    return [make("h4", {}, "Attends from → to (first prompt, without the first token)"), make("ul", { className: "pairs" }, ...items)];
  }

  methods.addEventListener("change", chooseModel);
  beside.addEventListener("change", () => { beside.dataset.chosen = "yes"; chooseSides(); });
  components.addEventListener("change", () => components.value && select({ head: components.value }));
  addEventListener("resize", show);
  onSelect((_, changed) => {
    if (changed.has("task")) chooseTask();
    else if (changed.has("model")) chooseModel();
    else show();
  });
})();
