"""What every picture begins with: axes to draw on, the caller's or those of a new figure."""

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("tfm.plot draws with matplotlib, which is not installed: pip install 'tfm-jax[plot]'") from error


def figure_and_axes(ax: Axes | None, width: float | int, height: float | int) -> tuple[Figure, Axes]:
    """The axes and the figure that they are in; where there are none yet, of so many inches."""
    if ax is None:
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots()
    return of_axes(ax), ax


def of_axes(ax: Axes) -> Figure:
    """The whole figure, where the axes are in a part of one too."""
    figure = ax.figure
    return figure if isinstance(figure, Figure) else figure.figure


def as_label(text: str) -> str:
    r"""A text as matplotlib is to show it: no dollar sign begins a formula, and every character can be seen.

    Example:
        >>> print(as_label("5 $\n"))
        5 \$\n
    """
    seen = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(seen).replace("$", r"\$")


def as_legend(text: str) -> str:
    """The same for a legend, from which matplotlib leaves out what begins with an underscore."""
    return as_label(f" {text}" if text.startswith("_") else text)
