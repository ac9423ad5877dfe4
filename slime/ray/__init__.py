"""Documented import paths of older plug-ins. The code is in the other packages of slime."""
