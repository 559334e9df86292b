"""The contrast of colours as WCAG 2.2 defines it, written down independently of fedsim."""

from __future__ import annotations

from matplotlib.colors import to_rgb

READABLE = 4.5  # level AA for text of normal size


def contrast(*colours):
    """Return the contrast ratio of two colours, each a name, a hex code or a tuple (red, green, blue) from 0 to 1."""
    luminances = []
    for colour in colours:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        luminances.append(sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)
