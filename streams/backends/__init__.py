"""Backends other than a `Server` of tools: each module has one kind."""

from streams.server.backend import Backend as Backend
from streams.server.backend import Guest as Guest
from streams.server.patience import PatienceSettings as PatienceSettings
