"""Kvasir's tests: unit, contract (the same tests on every implementation), integration, acceptance."""
