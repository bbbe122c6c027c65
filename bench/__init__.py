"""Measurements. Ratios within one run are meant to be compared; absolute times depend on the machine."""
