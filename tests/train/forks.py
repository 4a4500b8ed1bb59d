"""Processes that have torch from their start: forks of one that has imported it.

A test's process has one forkserver, which imports what was named last before its first fork. So all modules use this
one. Without torch._dynamo, each fork would import that when it makes an optimizer: 1.6 s of processor time. The scripts
with a Trainer would import transformers or Lightning: 1.8 s.
"""

from __future__ import annotations

import multiprocessing

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "numpy",
        "pytest",
        "hypothesis",
        "spotrun.train.run",
        "spotrun.train.hugging_face.train",
        "pytorch_lightning",
    ]
)
