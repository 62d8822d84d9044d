// The one selection of the page: a task, a model, a head, a prompt and a number of edges. Every view shows it, and the
// fragment of the URL keeps it, so that a link shows the same view.
"use strict";

(() => {
  const { data, find, fill, signed } = window.gatelens;
  const KEYS = ["task", "model", "head", "prompt", "edges"];
  const COMPONENT = /^(L\d+(H|KV)\d+|M\d+|embed|logits)$/;
  const pickers = Object.fromEntries(["task", "model", "head"].map((name) => [name, find(`select-${name}`)]));
  const listeners = [];
  const state = { task: "", model: "", head: "", prompt: 0, edges: null };

  // Call a function now and after every change, as listener(state, changed), with the keys that changed.
  function onSelect(listener) {
    listeners.push(listener);
    listener(state, new Set(KEYS));
  }

  // Change the selection, and keep it in the URL.
  function select(changes) {
    apply(changes);
    const kept = KEYS.filter((key) => state[key] !== null && state[key] !== "").map((key) => [key, state[key]]);
    history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
  }

  const task = () => data.tasks.find(({ name }) => name === state.task);
  const model = () => task().models.find(({ label }) => label === state.model);

  // What was asked, where it exists; otherwise the nearest that does.
  function apply(changes) {
    const before = { ...state };
    Object.assign(state, changes);
    if (!task()) state.task = data.first.task ?? data.tasks[0].name;
    if (!model()) state.model = task().models[0].label;
    const names = model().heads.map(([name]) => name);
    const isKnown = names.includes(state.head) || (COMPONENT.test(state.head) && !(names.length && /H/.test(state.head)));
    if (!isKnown) state.head = model().table?.lines[0]?.head ?? names[0] ?? "";
    state.prompt = Math.max(0, Math.trunc(Number(state.prompt)) || 0);
    state.edges = state.edges === null ? null : Math.max(1, Math.trunc(Number(state.edges)) || 1);
    const changed = new Set(KEYS.filter((key) => state[key] !== before[key]));
    if (!changed.size) return;
    show(changed);
    listeners.forEach((listener) => listener(state, changed));
    document.dispatchEvent(new CustomEvent("gatelens:selected", { detail: { ...state } }));
  }

  function show(changed) {
    if (changed.has("task") || changed.has("model")) {
      fill(pickers.task, data.tasks.map(({ name, title }) => [name, title]), state.task);
      fill(pickers.model, task().models.map(({ label }) => [label, label]), state.model);
      fill(pickers.head, model().heads.map(([name, score]) => [name, `${name} (${signed(score)})`]));
      find("select-head-by").textContent = model().ranked_by ? `Head, by score of ${model().ranked_by}` : "Head";
    }
    [...pickers.head.options].filter((option) => option.dataset.other).forEach((option) => option.remove());
    if (![...pickers.head.options].some((option) => option.value === state.head)) {
      const other = new Option(state.head, state.head);
      other.dataset.other = "yes"; // a component that is not a head, or whose score was not saved
      pickers.head.prepend(other);
    }
    pickers.head.value = state.head;
    document.querySelectorAll("button.head").forEach(mark);
  }

  // Buttons that select a head say whether it is selected. Views call this for the buttons that they make.
  function mark(button) {
    button.setAttribute("aria-pressed", button.dataset.head === state.head);
  }

  function fromUrl() {
    const asked = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    return Object.fromEntries(KEYS.filter((key) => key in asked).map((key) => [key, asked[key]]));
  }

  Object.assign(window.gatelens, { onSelect, select, mark, selected: { task, model, state } });
  if (!data.tasks.length) return;
  apply(fromUrl());
  addEventListener("hashchange", () => location.hash.includes("=") && apply(fromUrl()));
  Object.entries(pickers).forEach(([key, picker]) => picker.addEventListener("change", () => select({ [key]: picker.value })));
  // The links to sections do not replace the selection in the URL.
  document.querySelectorAll("nav a, .skip").forEach((link) => link.addEventListener("click", (event) => {
    if (!location.hash.includes("=")) return;
    event.preventDefault();
    const target = document.querySelector(link.getAttribute("href"));
    target.tabIndex = -1;
    target.focus({ preventScroll: true });
    target.scrollIntoView();
  }));
})();
