"""The field for the name under which decisions are kept. The browser remembers it.

Also the keys for a form's points.
"""

from urllib.parse import quote

import streamlit as st

from desk.pages.shared import COOKIE

_NAME_HELP = (
    "Kept in this browser, and written beside your decisions. No file for a learning platform or a student contains it."
)
# Streamlit sends the text of a field when the focus leaves the field. This script also sends the text when the person
# pauses or leaves the page, so that a reload or Back loses nothing.
#
# When a section is chosen, the script takes the focus from its radio button, so that the page receives key presses.
_SCRIPT = """; path=/; max-age=31536000; samesite=strict';
if (document.activeElement.type === "radio") document.activeElement.blur();
if (!window.kvasir) {
  window.kvasir = 1;
  const enter = {key: "Enter", code: "Enter", ctrlKey: true, bubbles: true};
  addEventListener("beforeunload", () => document.activeElement.blur());
  addEventListener("click", ({detail, target}) => {  // with the mouse; whoever uses the arrow keys stays there
    const section = target.closest("[data-testid=stSidebar] label");
    if (detail && section) setTimeout(() => document.activeElement.blur(), 100);
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const {key, target} = event;
    // Where the browser writes 2.5, its number fields pass a comma over: 2,5 would become 25.
    if (key === "," && target.type === "number" && (1.5).toLocaleString().includes(".")) {
      event.preventDefault();
      document.execCommand("insertText", false, ".");
    }
    if (!document.querySelector(".st-key-form")) return;
    if (target.matches("input, textarea, [contenteditable]")) return key === "Escape" && target.blur();
    if (/^[0-9]$/.test(key)) {
      const buttons = [...document.querySelectorAll(".st-key-points-at-hand button")];
      buttons.find((button) => button.innerText.trim() === key)?.click();
    }
  });
  addEventListener("input", ({target}) => {
    clearTimeout(window.kvasir);
    if (target.closest(".st-key-form"))
      window.kvasir = setTimeout(() => {  // up again too, or the buttons' keys wait for it
        for (const press of ["keydown", "keyup"]) target.dispatchEvent(new KeyboardEvent(press, enter));
      }, 300);
  });
}"""


def ask_name() -> None:
    """Ask for the name once. The browser keeps it; no address contains it."""
    state = st.session_state
    state.setdefault("your name", state["me"])
    state["me"] = " ".join(st.text_input("Your name", max_chars=80, key="your name", help=_NAME_HELP).split())
    cookie = quote(f"{state['browser']} {state['me']}", safe="")
    st.html(f"<script>document.cookie = '{COOKIE}={cookie}{_SCRIPT}</script>", unsafe_allow_javascript=True)
