"""Comparison of our FP8 contract with published formulas, and with their libraries where these are installed.

`formulas` contains the published arithmetic, rewritten from its sources; `libraries` calls the libraries;
`comparison_table` compares.
"""
