"""Style and script of report.html."""

from __future__ import annotations

# Contrast is at least 4.5:1 for every text in both schemes. Names and passages are isolated, so that a right-to-left
# mark in one can't reorder what follows it.
STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fdfcfa; --ink: #1d1f21; --quiet: #63666a; --line: #e2dfd8; --panel: #f5f3ee;
  --link: #1d4f63; --warn: #8a4b08; --warn-panel: #fbf0de; --bad: #9b2226; --bad-panel: #fae9e8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #17181a; --ink: #e6e4df; --quiet: #a09d97; --line: #33353a; --panel: #1f2124;
    --link: #8fc1d4; --warn: #e9b872; --warn-panel: #33281a; --bad: #f0a09b; --bad-panel: #3a2020;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-padding-top: 1rem; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif;
  overflow-wrap: anywhere;
}
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1rem 5rem; }
h1, h2 {
  font-family: Charter, "Iowan Old Style", "Source Serif 4", Georgia, serif; line-height: 1.2; font-weight: 600;
}
h1 { font-size: clamp(1.6rem, 1.2rem + 2vw, 2.3rem); margin: 0 0 .35rem; text-wrap: balance; }
h2 { font-size: 1.3rem; margin: 0; }
h3, h4 { font-size: 1rem; line-height: 1.4; margin: 0; font-weight: 600; }
a { color: var(--link); text-underline-offset: .15em; text-decoration-thickness: 1px; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; border-radius: 2px; }
section { margin-top: 3rem; }
.lead { margin: 0; color: var(--quiet); }
.quiet { color: var(--quiet); font-weight: 400; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.notice {
  margin: 0; padding: .75rem 1rem; background: var(--warn-panel); color: var(--warn);
  border-bottom: 1px solid currentColor; font-weight: 600; text-align: center;
}
.facts {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .9rem 1.5rem;
  margin: 1.5rem 0 0; padding: 1rem 0; border-block: 1px solid var(--line);
}
.facts dt { color: var(--quiet); font-size: .8rem; }
.facts dd { margin: 0; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; margin-top: .75rem; }
table { border-collapse: collapse; width: 100%; font-size: .95rem; }
th, td {
  text-align: left; vertical-align: baseline; padding: .5rem 1rem .5rem 0; border-bottom: 1px solid var(--line);
}
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--quiet); font-size: .8rem; font-weight: 400; white-space: nowrap; overflow-wrap: normal; }
tbody th { font-weight: 400; min-width: 8rem; }
tbody th, h3, h4 span, blockquote, article p, li, .summary, .reason { unicode-bidi: isolate; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide, .meter { display: none; }
.meter { width: 30%; }
.flags { white-space: nowrap; }
meter { display: block; width: 100%; height: .45rem; min-width: 3rem; border: 0; background: var(--line); }
meter::-webkit-meter-bar { border: 0; border-radius: 0; background: var(--line); height: .45rem; }
meter::-webkit-meter-optimum-value { background: var(--link); }
meter::-moz-meter-bar { background: var(--link); }
.badge {
  display: inline-block; padding: 0 .5em; border-radius: .25rem; font-size: .8rem; line-height: 1.6;
  white-space: nowrap; color: var(--warn); background: var(--warn-panel);
}
.badge.failed { color: var(--bad); background: var(--bad-panel); }
.badge.empty { color: var(--quiet); background: var(--panel); }
.bar { display: flex; justify-content: space-between; align-items: baseline; gap: 1rem; margin-bottom: .75rem; }
button {
  font: inherit; font-size: .9rem; color: var(--link); background: none; cursor: pointer;
  border: 1px solid var(--line); border-radius: .3rem; padding: .2rem .7rem;
}
details { border-bottom: 1px solid var(--line); }
.bar + details { border-top: 1px solid var(--line); }
summary {
  display: flex; align-items: baseline; gap: .75rem; padding: .7rem 0; cursor: pointer; list-style: none;
}
summary::-webkit-details-marker { display: none; }
summary::before { content: "▸"; color: var(--quiet); flex: none; width: .8em; }
details[open] > summary::before { content: "▾"; }
summary h3 { flex: 1; font-weight: 500; }
.score { white-space: nowrap; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
.work { padding: 0 0 2rem 1.55rem; max-width: 46rem; }
.summary, .reason { margin: .25rem 0 1rem; }
.reason { color: var(--warn); }
.reason::first-letter { text-transform: uppercase; }
article { padding: .9rem 0; border-top: 1px solid var(--line); }
article h4 { display: flex; justify-content: space-between; align-items: baseline; gap: 1rem; }
article p, article .reason { margin: .35rem 0 0; }
blockquote {
  margin: .6rem 0 0; padding: .45rem .8rem; background: var(--panel); border-left: 2px solid var(--line);
  font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
}
blockquote.not-found { border-left-color: var(--warn); }
.warning { color: var(--warn); font-size: .9rem; }
.aside {
  margin-top: 1rem; padding-top: .9rem; border-top: 1px solid var(--line); color: var(--quiet); font-weight: 400;
}
ul { margin: .3rem 0 0; padding-left: 1.1rem; }
@media (min-width: 32rem) { .meter { display: table-cell; } }
@media (min-width: 50rem) { .wide { display: table-cell; } main { padding-top: 3.5rem; } }
@media print {
  main { max-width: none; padding: 0; }
  button { display: none; }
  article, tr { break-inside: avoid; }
  details { break-inside: auto; }
}
"""

# A link in the class table opens its submission; printing opens all. Without script a click opens each.
SCRIPT = """
(function () {
  var all = Array.prototype.slice.call(document.querySelectorAll("details"));
  var button = document.getElementById("all");
  function openTarget() {
    var target = /^#s\\d+$/.test(location.hash) && document.querySelector(location.hash);
    if (target) { target.open = true; target.scrollIntoView(); }
  }
  function setAll(open) { all.forEach(function (each) { each.open = open; }); }
  button.hidden = all.length < 2;
  button.addEventListener("click", function () {
    var open = all.some(function (each) { return !each.open; });
    setAll(open);
    button.textContent = open ? "Close all" : "Open all";
  });
  addEventListener("hashchange", openTarget);
  addEventListener("beforeprint", function () { setAll(true); });
  openTarget();
})();
"""
