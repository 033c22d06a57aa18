"""Stores canonical blocks as records in Redis, and the small facts that workers share. Imports `messages` only."""
