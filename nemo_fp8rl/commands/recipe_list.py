"""`nemo-fp8rl recipes`: the recipes that the package ships."""

from nemo_fp8rl.config.recipe_names import RECIPES, command_of, list_recipes


def show() -> None:
    """Print every recipe with the command that runs it."""
    recipes = list_recipes()
    width = max(map(len, recipes))
    for name, text in recipes.items():
        print(f"{name:{width}}  {command_of(name):7}  {text}")
    print(f"The files are in {RECIPES}; name one under `defaults:` in a recipe of your own.")
