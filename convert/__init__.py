"""Conversion between public layouts of a DSpine drafter and the hub layout; installs as `dspine_hub.conversion`.

What exists is one table, `formats.FORMATS`. A conversion consumes every tensor once or raises, fills every tensor of
the destination, initialises nothing at random and never writes to its source.
"""
