// What all views share. Text from runs is always set as text. The labels of plotly understand a few tags: see plain().
"use strict";

Object.assign(window.gatelens, {
  patterns: {}, // the attention patterns that are loaded, by the number of their view

  find: (id) => document.getElementById(id),

  // Make an element with properties and children. Strings become text.
  make(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  },

  // Set the options of a select: texts, whose values are their positions, or pairs of value and text.
  fill(select, options) {
    const pairs = options.map((option, i) => (Array.isArray(option) ? option : [i, option]));
    select.replaceChildren(...pairs.map(([value, text]) => new Option(text, value)));
  },

  // Escape a text so that plotly shows it as it is.
  plain: (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;"),

  // A token with visible spaces, line ends and tabs.
  token(text) {
    const shown = text.replaceAll("\n", "↵").replaceAll("\r", "␍").replaceAll("\t", "⇥");
    return shown.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "∅";
  },

  colour: (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(),

  // A length for a font size of 16 px, scaled to the font size of the page.
  scaled: (length) => (length * parseFloat(getComputedStyle(document.documentElement).fontSize)) / 16,

  signed: (value) => (value > 0 ? "+" : "") + Number(value.toPrecision(3)),

  // Draw with plotly in the colours of the page, without plotly's buttons.
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

  // Draw again when the page changes between light and dark colours.
  onScheme: (redraw) => matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw),
});
