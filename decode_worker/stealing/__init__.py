"""Taking other models' work: when it pays, and which models are loaded for it."""
