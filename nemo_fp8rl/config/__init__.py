"""The recipe: its typed schema, the YAML reader, and the checks across keys."""
