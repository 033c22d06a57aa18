// The table of a class. A click on a row, or Enter on its name, opens the submission. Its box selects the submission.
// All values are put into the page as text.

function cell(tag, ...children) {
  const element = document.createElement(tag);
  element.append(...children);
  return element;
}

function draw({ data, setStateValue, setTriggerValue }, root) {
  const chosen = new Set(data.chosen);
  const head = cell("tr", ...["", ...data.columns].map((name) => {
    const [first, ...others] = name.split(/(?<=_)/);
    const column = cell("th", first, ...others.flatMap((part) => [document.createElement("wbr"), part]));
    column.scope = "col";
    return column;
  }));
  const rows = data.rows.map(({ id, cells: [name, ...others], state }) => {
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = chosen.has(id);
    box.setAttribute("aria-label", `Choose ${name}`);
    box.dataset.key = `box ${id}`;
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(id);
      else chosen.delete(id);
      setStateValue("chosen", [...chosen]);
    });
    const open = cell("button", name);
    open.type = "button";
    open.dataset.key = `open ${id}`;
    const line = cell("tr", cell("td", box), cell("td", open), ...others.map((text) => {
      const short = cell("td", text.length > 160 ? `${text.slice(0, 150).trimEnd()} …` : text); // whole in Review
      short.title = text.length > 160 ? text : "";
      return short;
    }));
    line.children[data.columns.indexOf("remarks") + 1].className = "kv-remarks";
    line.children[2].replaceChildren(Object.assign(cell("span", others[0]), { className: `state state-${state}` }));
    line.addEventListener("click", ({ target }) => {
      // A click near the box counts as a click on the box. A click that selects text opens nothing.
      if (target.closest("td") === line.firstChild) return target === box ? undefined : box.click();
      if (String(getSelection()) === "" || target === open) setTriggerValue("open", id);
    });
    return line;
  });
  const focused = root.contains(document.activeElement) && document.activeElement.dataset.key;
  root.replaceChildren(cell("table", cell("thead", head), cell("tbody", ...rows)));
  if (focused) root.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  const names = [...root.querySelectorAll("button")];
  root.onkeydown = (event) => {
    const at = names.indexOf(document.activeElement);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (at < 0 || !step || !names[at + step]) return;
    event.preventDefault();
    names[at + step].focus();
  };
}

export default function (component) {
  const { parentElement, data } = component;
  const root = parentElement.querySelector(".kv-class");
  const drawn = JSON.stringify([data.columns, data.rows]); // without `chosen`, because the boxes already show it
  if (root.dataset.drawn === drawn) return;
  root.dataset.drawn = drawn;
  draw(component, root);
}
