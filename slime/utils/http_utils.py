"""Documented import path of the HTTP client; the code is in :mod:`slime.engines.http`."""

from slime.engines.http import HttpError, get, init_http_client, post

__all__ = ["HttpError", "get", "init_http_client", "post"]
