"use strict";
// Without this script the page shows the same; it adds a search and, beside a job, news.
(() => {
  const page = document.getElementById("page");
  const find = () => document.getElementById("find");

  function search() {
    const field = find();
    if (!field) return;
    field.parentElement.hidden = false;
    const words = field.value.toLowerCase();
    for (const row of page.querySelectorAll("tr.event")) {
      row.classList.toggle("unfound", !row.textContent.toLowerCase().includes(words));
    }
  }

  page.addEventListener("input", (event) => { if (event.target === find()) search(); });
  search();
  if (!page.hasAttribute("data-live")) return;

  // What the reader has set stays: boxes, search, open plans, focus, and where he has scrolled to.
  function replaceWith(fresh) {
    const focused = document.activeElement && document.activeElement.id;
    const caret = find() && find().selectionStart;
    const scrolled = [...page.querySelectorAll(".scroll")].map((box) => [box.className, box.scrollLeft, box.scrollTop]);
    const boxes = [...page.querySelectorAll("input")].map((box) => [box.id, box.checked, box.value]);
    const open = [...page.querySelectorAll("details[open]")].map((details) => details.id);
    page.replaceChildren(...fresh.childNodes);
    for (const [id, checked, value] of boxes) {
      const box = document.getElementById(id);
      if (box) { box.checked = checked; if (box.type === "search") box.value = value; }
    }
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    for (const [name, left, top] of scrolled) {
      const box = page.querySelector("." + CSS.escape(name.split(" ")[1]));
      if (box) { box.scrollLeft = left; box.scrollTop = top; }
    }
    search();
    if (focused) {
      const field = document.getElementById(focused);
      field?.focus({ preventScroll: true });
      if (field && field === find()) field.setSelectionRange(caret, caret);
    }
  }

  const lost = document.getElementById("lost");
  let shown = null;
  async function refresh() {
    const reading = !getSelection().isCollapsed;
    if (!document.hidden && !reading) {
      try {
        const answer = await fetch("./", { cache: "no-cache" });
        if (!answer.ok) throw new Error("status " + answer.status);
        const text = await answer.text();
        lost.hidden = true;
        if (text !== shown) {
          shown = text;
          const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("page");
          const top = scrollY;
          replaceWith(document.adoptNode(fresh));
          scrollTo({ top, behavior: "instant" });
        }
      } catch (error) {
        lost.textContent = "No answer from the sidecar (" + error.message + "); what you see is old.";
        lost.hidden = false;
      }
    }
    setTimeout(refresh, 2000);
  }
  setTimeout(refresh, 2000);
})();
