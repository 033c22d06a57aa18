"""What a cluster will do with a class, before it does it: a simulation of the pipeline, and what follows from it."""
