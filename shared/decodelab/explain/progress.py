"""A progress bar around whatever takes over two seconds."""

from collections.abc import Iterable


def progress(iterable: Iterable, **options: object) -> Iterable:
    """Show a bar that goes away at the end; without tqdm, just iterate."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return iterable
    return tqdm(iterable, leave=False, **options)
