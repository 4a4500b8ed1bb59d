"""The dashboard: pages for an operator's browser, served on the operator's computer by `make dashboard`.

`server` answers the browser. `guard` decides which requests are answered. What the cluster does now comes from the head
(`live`). Everything else comes from the bucket (`records`, `history`, `runs`), so the page works without a head too.
"""
