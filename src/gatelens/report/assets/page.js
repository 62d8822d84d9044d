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

  // Make an element of a drawing, with attributes and children.
  shape(tag, attributes = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    made.append(...children);
    return made;
  },

  // Set the options of a select: texts, whose values are their positions, or pairs of value and text.
  fill(select, options, value) {
    const pairs = options.map((option, i) => (Array.isArray(option) ? option : [i, option]));
    select.replaceChildren(...pairs.map(([each, text]) => new Option(text, each)));
    if (value !== undefined) select.value = value;
  },

  // A button that selects a head everywhere.
  headButton(name, text = name) {
    const button = gatelens.make("button", { type: "button", className: "head" }, text);
    button.dataset.head = name;
    button.addEventListener("click", () => gatelens.select({ head: name }));
    return button;
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

  percent: (share) => `${share > 0 && share < 0.0095 ? (100 * share).toPrecision(1) : Math.round(100 * share)} %`,

  // Draw with plotly in the colours of the page, without plotly's buttons.
  draw(element, traces, layout) {
    const font = { color: gatelens.colour("ink"), family: "system-ui, sans-serif", size: gatelens.scaled(12) };
    const bare = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: false, hovermode: "closest", font,
      hoverlabel: { bgcolor: gatelens.colour("paper"), bordercolor: gatelens.colour("line"), font },
    };
    element.style.height = `${layout.height}px`; // plotly would shrink an element without a height when it is resized
    return Plotly.react(element, traces, { ...bare, ...layout }, { displayModeBar: false, responsive: true, doubleClick: false, scrollZoom: false });
  },

  heat: (signed) => (signed
    ? [[0, "#b2182b"], [0.25, "#f4a582"], [0.5, "#f7f7f7"], [0.75, "#92c5de"], [1, "#2166ac"]]
    : "Viridis"),

  // Draw again when the page changes between light and dark colours.
  onScheme: (redraw) => matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw),
});
