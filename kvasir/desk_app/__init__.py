"""What the desk is given when it starts: its backend, the application that is served, and the script that it runs."""
