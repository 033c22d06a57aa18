// A student's work, block by block. Everything in it is put into the page as text, never as HTML.

/** Make an element. Children that are strings become text. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

const HEADING = /^#{1,6}[ \t]+(.*)$/;
const EMPHASIS = /\*\*([^*\n]{1,400})\*\*|`([^`\n]{1,400})`/g;

function prose(line) {
  const heading = HEADING.exec(line);
  const text = heading ? heading[1] : line;
  const pieces = [];
  let start = 0;
  for (const match of text.matchAll(EMPHASIS)) {
    pieces.push(text.slice(start, match.index), match[1] ? make("b", {}, match[1]) : make("code", {}, match[2]));
    start = match.index + match[0].length;
  }
  pieces.push(text.slice(start));
  return heading ? [make("b", { class: "work-heading" }, ...pieces)] : pieces;
}

const lines = {
  code: (line) => line.map(([kind, text]) => (kind ? make("i", { class: `work-${kind}` }, text) : text)),
  prose,
  output: (line) => [line],
};

function block({ kind, text, lines: body, marks, source, width, height }) {
  if (kind === "caption" || kind === "cut") return make("p", { class: kind === "cut" ? "kv-faint work-cut" : "kv-faint" }, text);
  if (kind === "plot") return make("img", { class: "work-plot", src: source, alt: text, width, height, title: "A click makes it larger, or small again", onclick: enlarge });
  if (kind === "table") return make("table", { class: "work-table" }, make("tbody", {}, ...body.map((cells, at) => row(cells, at, marks[at]))));
  const element = make("pre", { class: `work-${kind}` });
  body.forEach((line, at) => {
    if (at) element.append("\n");
    const pieces = lines[kind](line);
    if (marks[at] === undefined) element.append(...pieces);
    else element.append(make("mark", { title: marks[at], "data-criteria": marks[at] }, ...pieces), note(marks[at]));
  });
  return element;
}

const enlarge = ({ currentTarget }) => currentTarget.classList.toggle("work-large");

function row(cells, at, reason) {
  const tag = at ? "td" : "th";
  const inner = cells.map((cell) => make(cell ? tag : "td", {}, cell));
  if (reason === undefined) return make("tr", {}, ...inner);
  return make("tr", { class: "work-marked", title: reason, "data-criteria": reason }, ...inner, make("td", {}, note(reason)));
}

/** A note beside a marked line. It is not copied with the line. */
const note = (reason) => make("small", { class: "kv-note" }, `◂ ${reason}`);
