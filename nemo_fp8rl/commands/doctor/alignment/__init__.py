"""Do a recipe's layouts give every rank whole heads, and whole blocks of FP8?"""
