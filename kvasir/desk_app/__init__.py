"""What the desk is given when it starts: its backend, and the script that Streamlit runs."""
