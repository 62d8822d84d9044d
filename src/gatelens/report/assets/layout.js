// Where the components of a circuit stand: layers from bottom to top, and inside a layer in the order that dagre gives.
"use strict";

(() => {
  const KINDS = { KV: 0, H: 1, M: 2 }; // inside a layer, from bottom to top
  const NODE = { height: 18, letter: 6.7, padding: 12, gap: 8 };
  const PITCH = 27; // from one row to the next

  const nodeWidth = (name) => NODE.letter * name.length + NODE.padding;

  // The layer of a component and its place inside the layer; the embedding is below and the logits are above all layers.
  function height(name) {
    if (name === "embed") return [-1, 0];
    const [, layer, kind] = name.match(/^L?(?:M)?(\d+)(KV|H)?/) ?? [];
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

  // Fit places into a width: name -> {x, y, width}. Components of a row keep their order and do not overlap.
  function fit(places, width) {
    const byRow = [];
    places.forEach((at, name) => (byRow[at.row] ??= []).push({ name, width: nodeWidth(name), wanted: at.x }));
    const taken = (row) => row.reduce((sum, node) => sum + node.width + NODE.gap, NODE.gap);
    const full = Math.max(width, ...byRow.map(taken));
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
    return { nodes: fitted, width: full, height: total };
  }

  const apart = (a, b) => (a.width + b.width) / 2 + NODE.gap;

  window.gatelens.layout = { place, fit, nodeHeight: NODE.height, layerOf: (name) => height(name)[0] };
})();
