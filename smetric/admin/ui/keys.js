// What the keys do; the help dialog of the page lists them.

export function listen({ list, filters, decision }) {
  const text = document.getElementById("text");
  const help = document.getElementById("help");

  const anywhere = {
    "/": () => text.select(),
    "?": () => help.showModal(),
    ArrowDown: () => go(1),
    ArrowUp: () => go(-1),
    Home: () => go(-Infinity),
    End: () => go(Infinity),
    Enter: () => list.openSelected(),
    Escape: () => (decision.isOpen ? decision.close() : list.close()),
    " ": () => list.pause(!list.isHeld),
    m: () => filters.set("migrated", !filters.get("migrated")),
    x: () => filters.reset(),
    w: () => decision.isOpen && decision.whatIf?.focus(),
  };

  function go(by) {
    list.box.focus({ preventScroll: true });
    list.move(by);
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const { target, key } = event;
    if (target.closest("input, select, textarea")) {
      // From the text into the list: what was typed is applied at once.
      if (key === "Escape" || (target === text && (key === "Enter" || key === "ArrowDown"))) {
        event.preventDefault();
        if (target === text) filters.changed();
        list.box.focus({ preventScroll: true });
      }
      return;
    }
    const presses = key === "Enter" || key === " ";
    if (presses && target.closest("button, a, summary")) return;
    // A part that scrolls by itself keeps its arrows.
    const scrolls = target.closest(".scroll, .policy") && /^(Arrow|Home|End)/.test(key);
    const act = anywhere[key];
    if (!act || scrolls) return;
    event.preventDefault();
    act();
  });
}
