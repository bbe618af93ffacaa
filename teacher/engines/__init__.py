"""Engines that score sequences. The interface is in `base`; an engine's module is imported when it is chosen."""
