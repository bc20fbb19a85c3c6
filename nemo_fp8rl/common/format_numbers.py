"""Numbers for people, in texts that never show a value as exact that is not."""


def format_exactly(value: float, digits: int = 7) -> str:
    """Return the value in `digits` digits, or in more where those would show a whole number that it is not."""
    texts = (f"{value:.{count}g}" for count in range(digits, 18))
    text = next(text for text in texts if float(text) == value or float(text) != round(float(text)))
    mantissa, _, power = text.partition("e")
    return f"{mantissa}e{int(power)}" if power else text


def format_share(share: float) -> str:
    """Return a share as a percentage, with as many digits as set it apart from 0 and from 100 %."""
    texts = (f"{100 * share:.{digits}f}" for digits in range(1, 12))
    text = next((text for text in texts if share in (0, 1) or float(text) not in (0, 100)), repr(100 * share))
    return f"{text.removesuffix('.0')} %"
