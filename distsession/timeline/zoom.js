// Enlarges the pictures of timelines, which can be read without this, too. Ctrl and the wheel, or a
// double click, enlarge; dragging moves what is enlarged; a double click with Shift shows all.
// Each picture brings this script, and a notebook that is opened again has several pictures. The box
// of one that is not trusted is empty.
for (const outer of document.querySelectorAll(".distsession-timeline:not([data-zoom]) > svg")) {
  const box = outer.parentElement;
  box.dataset.zoom = "on";
  const inner = outer.querySelector("svg");
  const ticks = outer.querySelector(":scope > g:last-of-type");
  const range = outer.lastElementChild;
  const { width, height } = inner.viewBox.baseVal;
  const most = 1000;
  let from = 0;
  let shown = width;

  const show = (begin, size) => {
    shown = Math.min(width, Math.max(width / most, size));
    from = Math.min(width - shown, Math.max(0, begin));
    inner.setAttribute("viewBox", `${from} 0 ${shown} ${height}`);
    const all = shown === width;
    const seconds = (at) => `${((at * range.dataset.span) / width).toPrecision(4)} s`;
    ticks.style.display = all ? "" : "none";
    range.textContent = all
      ? ""
      : `${seconds(from)} to ${seconds(from + shown)} (double-click with Shift shows all)`;
  };

  // Where the pointer is, as a share of what is shown.
  const share = (event) => {
    const pixels = event.clientX - inner.getBoundingClientRect().left;
    const scale = outer.viewBox.baseVal.width / outer.getBoundingClientRect().width;
    return (pixels * scale) / width;
  };
  const zoom = (event, by) => show(from + share(event) * shown * (1 - by), shown * by);

  box.addEventListener(
    "wheel",
    (event) => {
      if (event.ctrlKey) {
        event.preventDefault();
        zoom(event, event.deltaY < 0 ? 0.8 : 1.25);
      }
    },
    { passive: false },
  );
  box.addEventListener("dblclick", (event) => {
    if (event.shiftKey) {
      show(0, width);
    } else {
      zoom(event, 0.5);
    }
  });

  let grip = null;
  box.addEventListener("pointerdown", (event) => {
    grip = { from, share: share(event) };
  });
  box.addEventListener("pointermove", (event) => {
    if (grip && event.buttons) {
      show(grip.from + (grip.share - share(event)) * shown, shown);
    }
  });
}
