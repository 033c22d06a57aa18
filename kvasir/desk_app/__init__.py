"""What the desk needs at its start: its backend, the application that is served, and the script that Streamlit runs."""
