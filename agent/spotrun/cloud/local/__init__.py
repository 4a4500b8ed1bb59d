"""The local cloud: a daemon with the semantics of a managed instance group, whose machines are process trees.

It needs Linux and nothing else: no root, no containers. `client.up` starts it, `client.down` ends it.

    client.py    the cloud protocol over HTTP, faults on demand, up and down
    daemon.py    the process of the cloud itself
    machines.py  pools and machines: what is wanted, what is there, and the way from one to the other
    group.py     the decisions of machines.py, as pure functions
    api.py       the daemon's HTTP interface
    metadata.py  what a machine can ask about itself, as GCE and as EC2 answer it
    node.py      the first process of a machine: starts the role, holds the SSH server (sshd.py)
    procs.py     finding, stopping and killing the processes of a machine
    cut.py       taking a machine off the network
    layout.py    files, addresses, ports and names
"""
