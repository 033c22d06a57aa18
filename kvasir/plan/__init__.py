"""Predicts what a cluster will do with a class, by a simulation of the pipeline."""
