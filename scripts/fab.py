"""Runs `fab` for the Makefile, so that Ctrl-C shows no traceback while Fabric loads."""

from __future__ import annotations

from scripts import ctrl_c

if __name__ == "__main__":
    ctrl_c.exit_quietly()
    from fabric.main import program

    program.run()
