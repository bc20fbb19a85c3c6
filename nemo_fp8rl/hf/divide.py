"""Whether a dimension of the model can be split over ranks: asked by the trainer's layout and by the engine's."""

from nemo_fp8rl.errors import UserError


def check_divides(key: str, parts: int, dimension: str, size: int, block: int = 1) -> None:
    """Raise UserError, with the sizes that fit, unless `parts` ranks can hold equal parts of `size` in whole blocks.

    key: the recipe's, which says `parts`. dimension: config.json's.
    """
    if parts > 1 and size % (parts * block):
        fits = ", ".join([str(n) for n in range(1, size // block + 1) if size % (n * block) == 0][:8]) or "none"
        blocks = f" in multiples of {block}, the blocks of FP8" if block > 1 else ""
        raise UserError(f"{key}={parts} does not divide the model's {dimension}={size}{blocks}; sizes that fit: {fits}")
