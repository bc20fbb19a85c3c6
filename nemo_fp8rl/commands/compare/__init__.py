"""Flows side by side over several seeds: a YAML file names them, runs are ordinary run directories, tables say what is
known.
"""
