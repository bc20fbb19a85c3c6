"""Our FP8 contract held against what others publish, and against their libraries where these are installed.

`formulas` has the published arithmetic, written anew from its sources; `libraries` the real thing; `table` compares.
"""
