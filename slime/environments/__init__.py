"""Documented import paths of the environments; the code is in
:mod:`slime.plugins.agents.environments`.
"""
