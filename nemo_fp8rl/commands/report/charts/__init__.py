"""Charts of the report as shapes: this package computes the positions, the stylesheet holds the colours."""
