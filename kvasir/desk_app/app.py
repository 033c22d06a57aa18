"""The application that Streamlit serves: the desk, behind the check of who may ask.

Streamlit's own `server.allowedHosts` is asked for WebSockets only; media, uploads and downloads are plain HTTP.
"""

from pathlib import Path

from starlette.middleware import Middleware
from streamlit import App, get_option

from monitoring.access import LOOPBACK, HostGuard

app = App(
    Path(__file__).with_name("script.py"),
    middleware=[Middleware(HostGuard, listens_on=get_option("server.address") or LOOPBACK)],
)
