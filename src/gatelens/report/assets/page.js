// What all views share. Text from runs is only ever set as text; for plotly, whose labels know a few tags, see plain().
"use strict";

Object.assign(window.gatelens, {
  patterns: {}, // attention patterns that have been read, by the number of their view

  find: (id) => document.getElementById(id),

  // An element with properties and children; strings become text.
  make(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  },

  // Give a select its options: an array of texts, whose values are their places, or pairs of value and text.
  fill(select, options) {
    const pairs = options.map((option, i) => (Array.isArray(option) ? option : [i, option]));
    select.replaceChildren(...pairs.map(([value, text]) => new Option(text, value)));
  },

  // Text that plotly shows as it is.
  plain: (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;"),

  // A token with what cannot be seen made visible.
  token(text) {
    const shown = text.replaceAll("\n", "↵").replaceAll("\r", "␍").replaceAll("\t", "⇥");
    return shown.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "∅";
  },

  colour: (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(),

  // A length that was chosen for letters of 16 px, on a page whose letters are larger.
  scaled: (length) => (length * parseFloat(getComputedStyle(document.documentElement).fontSize)) / 16,

  signed: (value) => (value > 0 ? "+" : "") + Number(value.toPrecision(3)),

  // A plotly drawing that fits its element and the colours of the page, without buttons of its own.
  draw(element, traces, layout) {
    const font = { color: gatelens.colour("ink"), family: "system-ui, sans-serif", size: gatelens.scaled(12) };
    const bare = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: false, hovermode: "closest", font,
      hoverlabel: { bgcolor: gatelens.colour("paper"), bordercolor: gatelens.colour("line"), font },
    };
    return Plotly.react(element, traces, { ...bare, ...layout }, { displayModeBar: false, responsive: true, doubleClick: false, scrollZoom: false });
  },

  heat: (signed) => (signed
    ? [[0, "#b2182b"], [0.25, "#f4a582"], [0.5, "#f7f7f7"], [0.75, "#92c5de"], [1, "#2166ac"]]
    : "Viridis"),

  // Draw again when the colours of the page change.
  onScheme: (redraw) => matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw),
});
