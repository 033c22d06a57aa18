"""Canonical blocks to records to Redis, and the small facts that workers share. Imports messages only."""
