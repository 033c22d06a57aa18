"""The grading desk: what an instructor sees and decides, as data. Only `desk.pages` imports Streamlit.

An assignment is a folder: the batch (`batch.json`, `results.jsonl`), and beside it what the desk keeps: `desk.json`
(inputs), `reviews.jsonl` (a person's decisions), `rubrics/` (versions), `rounds/` (regrades), `runs/` (processes).
"""
