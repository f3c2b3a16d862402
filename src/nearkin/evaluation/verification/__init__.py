"""Verification: rates and thresholds over pairs, their intervals, and what a score means."""
