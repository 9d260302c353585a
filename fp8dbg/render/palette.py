"""The colours of page and pictures, light and dark: one colour per meaning, safe for colour-blind readers.

Lines use the Okabe-Ito hues. A colour scale starts near the paper's own colour, so that what is healthy recedes.
"""

from __future__ import annotations

from typing import Any

Palette = dict[str, Any]

LIGHT: Palette = {
    "--paper": "#ffffff",
    "--panel": "#f7f8f9",
    "--void": "#e4e7ea",
    "--ink": "#16191d",
    "--muted": "#59626d",
    "--grid": "#e3e6e9",
    "--line": "#c9ced4",
    "--link": "#00588f",
    "--act": "#b3261e",
    "--watch": "#8a5a00",
    "--fine": "#116b4f",
    "--blue": "#0072b2",
    "--orange": "#c9540a",
    "--green": "#00795a",
    "--purple": "#9a3b78",
    "--grey": "#7a838d",
    "--shade-lost": "rgba(232,130,14,0.20)",
    "--shade-subnormal": "rgba(232,130,14,0.07)",
    "--shade-clipped": "rgba(150,96,184,0.22)",
    "--scale-lost": ["#fbfaf7", "#fee6b8", "#fdbb5b", "#e8820e", "#a84a06", "#5e2203"],
    "--scale-clipped": ["#faf9fb", "#e3d7ee", "#c0a2d6", "#9660b8", "#6a2a94", "#3a0a5c"],
    "--scale-error": ["#f8fafb", "#d5e8f0", "#8fc3dd", "#3e8fc0", "#15598f", "#0a2c52"],
    "--scale-outlier": ["#f8faf8", "#d6ecd9", "#93cfa4", "#46a574", "#157a54", "#06452f"],
    "--scale-broken": ["#fbf9fa", "#f7c6dc", "#ec6aa8", "#c2186f", "#7a0042"],
    "--scale-delta": ["#1b4f91", "#5b9bc9", "#cfe3ef", "#f8f8f7", "#fbd8c4", "#e5805a", "#a51626"],
}

DARK: Palette = {
    "--paper": "#14171b",
    "--panel": "#1b1f24",
    "--void": "#0b0d0f",
    "--ink": "#e6e9ec",
    "--muted": "#9aa4af",
    "--grid": "#2a2f36",
    "--line": "#3b424a",
    "--link": "#7cc0f0",
    "--act": "#ff8a80",
    "--watch": "#f0b648",
    "--fine": "#5fcba4",
    "--blue": "#56b4e9",
    "--orange": "#f0883e",
    "--green": "#35c09b",
    "--purple": "#d992bd",
    "--grey": "#8b95a0",
    "--shade-lost": "rgba(247,185,85,0.20)",
    "--shade-subnormal": "rgba(247,185,85,0.07)",
    "--shade-clipped": "rgba(186,140,220,0.26)",
    "--scale-lost": ["#1d2126", "#4a2f10", "#8a5210", "#cf8420", "#f7b955", "#fff0cc"],
    "--scale-clipped": ["#1d2126", "#3a2650", "#65408a", "#9a6ac4", "#c9a5e8", "#f3e6ff"],
    "--scale-error": ["#1d2126", "#12344f", "#1a5c8c", "#3d93cb", "#8ac6ec", "#e2f4ff"],
    "--scale-outlier": ["#1d2126", "#12402f", "#1b6b4c", "#35a177", "#86d4ae", "#e2fbee"],
    "--scale-broken": ["#1d2126", "#5a1038", "#a81f68", "#ee6cab", "#ffd7e8"],
    "--scale-delta": ["#9fd2f2", "#3d86bf", "#22415b", "#23272d", "#5c3328", "#cf6a45", "#ffc1a8"],
}

PALETTES = {"light": LIGHT, "dark": DARK}


def painted(chart: Any, palette: Palette) -> Any:
    """The chart with every colour name ("--blue") replaced by that palette's colour; the input is left alone."""
    if isinstance(chart, dict):
        return {key: painted(value, palette) for key, value in chart.items()}
    if isinstance(chart, list):
        return [painted(value, palette) for value in chart]
    if isinstance(chart, str) and chart.startswith("--scale-"):
        colours = palette[chart]
        return [[i / (len(colours) - 1), colour] for i, colour in enumerate(colours)]
    return palette.get(chart, chart) if isinstance(chart, str) else chart


def css_variables(palette: Palette) -> str:
    """The palette's plain colours as CSS custom properties."""
    return "".join(f"{name}:{value};" for name, value in palette.items() if isinstance(value, str))
