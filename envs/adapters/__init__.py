"""Worlds of other projects as worlds of ours: one file a project, imported only when one of its worlds is named."""
