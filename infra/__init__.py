"""The broker and its topology, the loop that both workers run, the settings, deployment. Imports messages only."""
