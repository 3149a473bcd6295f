"""Measure a pair: decode both ways in one run, record how, and time the operations."""
