"""The desk's pages, drawn with Streamlit. All decisions are made in `desk`."""
