"""Documented import paths for users' plugins. The code itself is in the other packages of slime."""
