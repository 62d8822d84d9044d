// Save a figure of the page as SVG or PNG. Everything happens in the page: nothing is sent anywhere.
"use strict";

(() => {
  const { make, shape, colour } = window.gatelens;
  const SCALE = 2; // pixels of a PNG for each pixel of the page
  const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity", "font-size", "font-family", "font-weight", "text-anchor", "dominant-baseline"];

  // Buttons that save a figure. name() names the file, and svg() returns the SVG as text, or a promise of it.
  function exportButtons(name, svg, label = name()) {
    const buttons = ["svg", "png"].map((format) => {
      const button = make("button", { type: "button", className: "button" }, format.toUpperCase());
      button.setAttribute("aria-label", `Save as ${format.toUpperCase()}: ${label}`);
      button.addEventListener("click", () => save(format, name(), svg));
      return button;
    });
    return make("span", { className: "buttons" }, ...buttons);
  }

  async function save(format, name, svg) {
    const text = await svg();
    const blob = format === "svg" ? new Blob([text], { type: "image/svg+xml" }) : await png(text);
    const file = `${name.replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 80)}.${format}`;
    const link = make("a", { href: URL.createObjectURL(blob), download: file });
    link.click();
    URL.revokeObjectURL(link.href);
    document.dispatchEvent(new CustomEvent("gatelens:saved", { detail: { file, blob } }));
  }

  async function png(text) {
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    const canvas = make("canvas", { width: SCALE * image.naturalWidth, height: SCALE * image.naturalHeight });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }

  // A plot of plotly as SVG, on the page's background.
  async function plotSvg(plot) {
    const layout = { ...plot.layout, paper_bgcolor: colour("paper") };
    const url = await Plotly.toImage({ data: plot.data, layout }, { format: "svg", width: plot.clientWidth, height: plot.clientHeight });
    return decodeURIComponent(url.slice(url.indexOf(",") + 1));
  }

  // A drawing of the page as SVG: the styles of the page are written into a copy, because the file has no style sheet.
  function drawingSvg(drawing) {
    const copy = drawing.cloneNode(true);
    const { width, height } = drawing.viewBox.baseVal;
    const [originals, copies] = [drawing, copy].map((root) => [...root.querySelectorAll("*")]);
    originals.forEach((element, i) => {
      const style = getComputedStyle(element);
      STYLES.forEach((property) => copies[i].setAttribute(property, style.getPropertyValue(property)));
      ["class", "style"].forEach((name) => copies[i].removeAttribute(name));
    });
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    copy.removeAttribute("style");
    copy.prepend(shape("rect", { width, height, fill: colour("paper") }));
    return new XMLSerializer().serializeToString(copy);
  }

  Object.assign(window.gatelens, { exportButtons, plotSvg, drawingSvg });
})();
