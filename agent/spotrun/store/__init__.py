"""The bucket: a client, and the keys of its objects."""

from spotrun.store.client import Store as Store
from spotrun.store.client import Version as Version
from spotrun.store.keys import *  # noqa: F403
