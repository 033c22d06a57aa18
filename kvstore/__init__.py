"""Stores KV caches as records in Redis, and the small facts that workers share. Imports messages only."""
