"""The names and interfaces of the team's earlier scripts, on top of Kvasir (docs/how-to/migration.md)."""

from kvasir.compat.client import DisaggregatedClient, DisaggregatedInference, GenerationFailed
from kvasir.compat.grader import BusinessAnalyticsGraderV2, GradingFailed, grade_submission
from kvasir.compat.models import resolve_model

__all__ = [
    "BusinessAnalyticsGraderV2",
    "DisaggregatedClient",
    "DisaggregatedInference",
    "GenerationFailed",
    "GradingFailed",
    "grade_submission",
    "resolve_model",
]
