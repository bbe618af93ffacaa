"""Conversations of several turns: environments and tools of the user, and the loop between them and the engines."""
