"""The desk's pages: what Streamlit draws. All that is decided is decided in `desk`."""
