"""The grading desk: what an instructor sees and decides, as data. Only `desk.pages` imports Streamlit.

An assignment is a folder. It holds the batch (`batch.json`, `results.jsonl`) and the desk's files: `desk.json`
(inputs), `reviews.jsonl` (a person's decisions), `rubrics/` (versions), `rounds/` (regrades), `runs/` (processes).
"""
