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
