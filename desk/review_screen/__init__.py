"""The screen on which a class is reviewed: what it shows, how it looks, and what is done with each act on it.

Streamlit's own widgets answer after the server has; this screen answers in the browser, and tells the desk afterwards.
"""
