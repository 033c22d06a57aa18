"""The application that Streamlit serves: the desk, behind a check of the host name.

Streamlit checks its own `server.allowedHosts` only for WebSockets, but media, uploads and downloads use plain HTTP.
"""

from pathlib import Path

from starlette.middleware import Middleware
from streamlit import App, get_option

from monitoring.access import LOOPBACK, HostGuard

app = App(
    Path(__file__).with_name("script.py"),
    middleware=[Middleware(HostGuard, listens_on=get_option("server.address") or LOOPBACK)],
)
