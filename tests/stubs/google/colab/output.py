"""Records what a lesson asks of Colab's output area."""

calls: list[str] = []


def enable_custom_widget_manager() -> None:
    """Record the call: lessons use core widgets only and should not need it."""
    calls.append("enable_custom_widget_manager")


def disable_custom_widget_manager() -> None:
    calls.append("disable_custom_widget_manager")


def clear() -> None:
    calls.append("clear")
