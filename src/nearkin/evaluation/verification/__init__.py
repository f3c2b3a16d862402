"""Verification: scores of pairs, thresholds and rates, calibration, and their intervals."""
