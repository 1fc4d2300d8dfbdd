"use strict";

// The token is in a cookie now.
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname);

// ---- The list: search and filters -------------------------------------------------------------------
const filters = document.querySelector("form.filters[role=search]");
const items = [...document.querySelectorAll(".prompts li")];

function filter() {
  const chosen = [...filters.querySelectorAll("select")].filter((select) => select.value);
  const words = filters.elements.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const item of items) {
    item.text ??= item.textContent.toLowerCase();
    const fits = chosen.every((each) => item.dataset[each.name].split("|").includes(each.value));
    item.hidden = !(fits && words.every((word) => item.text.includes(word)));
    if (!item.hidden) count += 1;
  }
  document.getElementById("found").textContent = `${count} of ${items.length} prompts`;
}

if (filters) {
  filters.addEventListener("input", filter);
  filters.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("pageshow", filter); // a browser that goes back fills in what was chosen
}

// ---- One static file: a link opens the prompt that it leads to ------------------------------------------
function open() {
  const part = document.getElementById(location.hash.slice(1))?.querySelector("details");
  if (part) part.open = true;
}
addEventListener("hashchange", open);
open();

// ---- The bird's-eye view: lengths of one dataset after the other ------------------------------------------
async function measure() {
  for (const row of document.querySelectorAll("tr[data-measure]")) {
    const answer = await fetch("/measured?dataset=" + encodeURIComponent(row.dataset.measure));
    if (!answer.ok) continue;
    for (const cell of [...row.cells].slice(5)) cell.remove();
    row.insertAdjacentHTML("beforeend", await answer.text());
  }
}
measure();

// ---- The editor ----------------------------------------------------------------------------------------
const editor = document.getElementById("editor");

if (editor) {
  const rows = document.getElementById("rows");
  const place = document.getElementById("place");
  const restored = editor.querySelector(".draft");
  const key = `draft ${editor.dataset.dataset} ${editor.dataset.like}`;
  const fields = () => ({
    name: editor.elements.name.value,
    jinja: editor.elements.jinja.value,
    answer_choices: editor.elements.answer_choices.value,
    original_task: editor.elements.original_task.checked,
    choices_in_prompt: editor.elements.choices_in_prompt.checked,
    metrics: [...editor.querySelectorAll("[name=metrics]:checked")].map((each) => each.value),
  });
  const saved = JSON.stringify(fields());
  const remember = () => {
    const text = JSON.stringify(fields());
    if (text === saved) localStorage.removeItem(key);
    else localStorage.setItem(key, JSON.stringify({ base: editor.dataset.base, text }));
  };

  // What was typed and not saved is back after a reload, unless the prompt has changed on disk since.
  const draft = JSON.parse(localStorage.getItem(key) ?? "null");
  if (draft) {
    const text = JSON.parse(draft.text);
    for (const name of ["name", "jinja", "answer_choices"]) editor.elements[name].value = text[name];
    for (const name of ["original_task", "choices_in_prompt"]) editor.elements[name].checked = text[name];
    for (const each of editor.querySelectorAll("[name=metrics]")) each.checked = text.metrics.includes(each.value);
    editor.dataset.base = draft.base;
    restored.hidden = false;
  }
  document.getElementById("discard").addEventListener("click", () => {
    localStorage.removeItem(key);
    location.reload();
  });

  const post = (address, more) =>
    fetch(address, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        dataset: editor.dataset.dataset,
        like: editor.dataset.like,
        draft: { ...fields(), identifier: editor.dataset.identifier, base: editor.dataset.base },
        split: place.elements.split.value,
        start: Number(place.elements.start.value) || 0,
        ...more,
      }),
    });

  // Rendered as one types; a later answer replaces an earlier one, whichever comes first.
  let asked = 0;
  let timer = 0;
  async function show() {
    const number = ++asked;
    rows.setAttribute("aria-busy", "true");
    for (const scored of editor.dataset.scored ? [false, true] : [false]) {
      try {
        const answer = await post("/rows", { scored });
        const html = await answer.text();
        if (number !== asked) return;
        rows.innerHTML = html;
      } catch {
        if (number === asked) rows.querySelector(".findings").textContent = "t0repro browse does not answer; your text is kept.";
        break;
      }
    }
    if (number === asked) rows.setAttribute("aria-busy", "false");
  }
  const soon = () => {
    clearTimeout(timer);
    timer = setTimeout(show, 80);
  };
  editor.addEventListener("input", () => {
    remember();
    soon();
  });
  place.addEventListener("input", soon);
  place.addEventListener("submit", (event) => event.preventDefault());
  place.addEventListener("click", (event) => {
    const step = Number(event.target.dataset.step);
    if (!step) return;
    const start = place.elements.start;
    start.value = Math.max((Number(start.value) || 0) + step, 0);
    show();
  });
  editor.addEventListener("click", (event) => {
    const text = event.target.dataset.insert;
    if (!text) return;
    const area = editor.elements.jinja;
    area.setRangeText(text, area.selectionStart, area.selectionEnd, "end");
    area.focus();
    remember();
    soon();
  });
  // The place of an error.
  rows.addEventListener("click", (event) => {
    const button = event.target.closest(".place");
    const area = button && editor.elements[button.dataset.field];
    if (!area) return;
    const lines = area.value.split("\n");
    const start = lines.slice(0, button.dataset.line - 1).join("\n").length + (button.dataset.line > 1 ? 1 : 0);
    area.focus();
    area.setSelectionRange(start, start + lines[button.dataset.line - 1].length);
  });
  editor.addEventListener("submit", async (event) => {
    event.preventDefault();
    const sent = JSON.stringify(fields());
    const result = document.getElementById("saved");
    try {
      const answer = await post("/save", {});
      if (!answer.ok) {
        result.innerHTML = await answer.text();
        return;
      }
      // What was typed while it was being saved stays a draft.
      if (JSON.stringify(fields()) === sent) localStorage.removeItem(key);
      location.assign(await answer.text());
    } catch {
      result.textContent = "t0repro browse does not answer; your text is kept.";
    }
  });
  if (draft || editor.dataset.scored) show();
}
