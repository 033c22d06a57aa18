"""The grading desk's backend, and the script that Streamlit runs."""
