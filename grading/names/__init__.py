"""Students' names: where they stand in a text, and how they are taken out."""
