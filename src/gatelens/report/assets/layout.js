// Where the components of a circuit stand: layers from bottom to top, and inside a layer in the order that dagre gives.
"use strict";

(() => {
  const KINDS = { KV: 0, H: 1, M: 2 }; // inside a layer, from bottom to top
  const NODE = { height: 18, letter: 6.7, padding: 12, gap: 8 };
  const PITCH = 27; // from one row to the next

  // A component, and the role of the positions that it stands for in a circuit of edges by role: "L3H7 at S2"
  function parts(name) {
    const at = name.indexOf(" at ");
    return at < 0 ? { component: name, role: "" } : { component: name.slice(0, at), role: name.slice(at + 4) };
  }

  const nodeWidth = (name) => NODE.letter * parts(name).component.length + NODE.padding;

  // The layer of a component and its place inside the layer; the embedding is below and the logits are above all layers.
  function height(name) {
    const { component } = parts(name);
    if (component === "embed") return [-1, 0];
    const [, layer, kind] = component.match(/^L?(?:M)?(\d+)(KV|H)?/) ?? [];
    return layer === undefined ? [Infinity, 0] : [Number(layer), KINDS[kind ?? "M"]];
  }

  // The row of each component. A layer has one row, and more only if its components are connected with each other.
  function rows(names, pairs) {
    const connected = new Set(pairs.map(([a, b]) => `${height(a)} ${height(b)}`));
    const heights = [...new Map(names.map((name) => [String(height(name)), height(name)])).values()].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const row = new Map();
    let [last, members] = [-1, []];
    heights.forEach((one) => {
      const joins = members.length && members[0][0] === one[0] && !members.some((other) => connected.has(`${other} ${one}`));
      if (!joins) [last, members] = [last + 1, []];
      members.push(one);
      row.set(String(one), last);
    });
    return Object.fromEntries(names.map((name) => [name, row.get(String(height(name)))]));
  }

  // The strongest edge into each component and out of it. They decide the order inside rows: with all edges, dagre would
  // keep room for each long edge, and the drawing would be several times as wide.
  function backbone(edges) {
    const best = new Map();
    edges.forEach((edge) => [`from ${edge.from}`, `to ${edge.to}`].forEach((end) => {
      if (!(best.get(end)?.weight >= edge.weight)) best.set(end, edge);
    }));
    return new Set(best.values());
  }

  // Edges as {from, to, weight}, links as pairs of names: name -> {x in 0..1, row}
  function place(edges, links) {
    const names = [...new Set(edges.flatMap(({ from, to }) => [from, to]))];
    const present = links.filter(([a, b]) => names.includes(a) && names.includes(b));
    const row = rows(names, [...edges.map(({ from, to }) => [from, to]), ...present]);
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ ranker: "none", nodesep: NODE.gap, edgesep: 2, ranksep: PITCH });
    graph.setDefaultEdgeLabel(() => ({}));
    names.forEach((name) => graph.setNode(name, { width: nodeWidth(name), height: NODE.height, rank: 2 * row[name] }));
    backbone(edges).forEach(({ from, to }) => graph.setEdge(from, to));
    present.forEach(([a, b]) => graph.setEdge(a, b, { weight: 3 }));
    dagre.layout(graph);
    const xs = names.map((name) => graph.node(name).x);
    const [left, right] = [Math.min(...xs), Math.max(...xs)];
    return new Map(names.map((name, i) => [name, { x: right > left ? (xs[i] - left) / (right - left) : 0.5, row: row[name] }]));
  }

  // The same for a circuit of edges by role: a column for each role, as wide as its widest row.
  function placeByRole(edges, links, roles) {
    const names = [...new Set(edges.flatMap(({ from, to }) => [from, to]))];
    const row = rows(names, [...edges.map(({ from, to }) => [from, to]), ...links]);
    const places = new Map();
    places.columns = [];
    let left = NODE.gap;
    for (const role of roles) {
      const byRow = Map.groupBy(names.filter((name) => parts(name).role === role), (name) => row[name]);
      if (!byRow.size) continue;
      const needed = (members) => members.reduce((sum, name) => sum + nodeWidth(name) + NODE.gap, NODE.gap);
      const width = Math.max(NODE.letter * Math.min(role.length, 12) + NODE.gap, ...[...byRow.values()].map(needed));
      byRow.forEach((members, at) => {
        let x = left + (width - needed(members)) / 2 + NODE.gap;
        members.sort((a, b) => a.localeCompare(b, "en", { numeric: true })).forEach((name) => {
          places.set(name, { centre: x + nodeWidth(name) / 2, row: at });
          x += nodeWidth(name) + NODE.gap;
        });
      });
      places.columns.push({ role, left, right: left + width });
      left += width;
    }
    places.least = left + NODE.gap;
    places.forEach((place, name) => { place.x = (place.centre - NODE.gap - nodeWidth(name) / 2) / (places.least - 2 * NODE.gap - nodeWidth(name)); });
    return places;
  }

  // Fit places into a width: name -> {x, y, width}. Components of a row keep their order and do not overlap.
  function fit(places, width) {
    const byRow = [];
    places.forEach((at, name) => (byRow[at.row] ??= []).push({ name, width: nodeWidth(name), wanted: at.x }));
    const taken = (row) => row.reduce((sum, node) => sum + node.width + NODE.gap, NODE.gap);
    const full = Math.max(width, places.least ?? 0, ...byRow.map(taken));
    const total = PITCH * byRow.length + 8;
    const fitted = new Map();
    byRow.forEach((row, number) => {
      row.sort((a, b) => a.wanted - b.wanted);
      row.forEach((node) => { node.x = NODE.gap + node.width / 2 + node.wanted * (full - 2 * NODE.gap - node.width); });
      for (let i = 1; i < row.length; i++) row[i].x = Math.max(row[i].x, row[i - 1].x + apart(row[i - 1], row[i]));
      row.at(-1).x = Math.min(row.at(-1).x, full - NODE.gap - row.at(-1).width / 2);
      for (let i = row.length - 2; i >= 0; i--) row[i].x = Math.min(row[i].x, row[i + 1].x - apart(row[i], row[i + 1]));
      row.forEach((node) => fitted.set(node.name, { x: node.x, y: total - PITCH * (number + 0.5) - 4, width: node.width }));
    });
    const scale = full / (places.least ?? full);
    const columns = (places.columns ?? []).map(({ role, left, right }) => ({ role, left: left * scale, right: right * scale }));
    return { nodes: fitted, width: full, height: total, columns };
  }

  const apart = (a, b) => (a.width + b.width) / 2 + NODE.gap;

  window.gatelens.layout = { place, placeByRole, fit, parts, nodeHeight: NODE.height, layerOf: (name) => height(name)[0] };
})();
